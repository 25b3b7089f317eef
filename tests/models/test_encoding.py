# SPDX-License-Identifier: Apache-2.0
"""Pictures to latents: the VAE's way back, against what diffusers' own pipelines do with a picture."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

from tests.models.cases import CPU, Loaded
from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.pixels import fitted, from_pixels, load_image_decoder, posterior_mode, to_pixels
from verl_digen.models.tiny.parts import LATENT_CHANNELS, image_vae
from verl_digen.types import Geometry

PICTURE = Geometry(64, 96)
EXACT = torch.float64
"""Precision of the comparisons: in fp32 the rounding of a batch differs from that of one picture, by processor."""


def pictures(geometry: Geometry) -> list[Image.Image]:
    """Two pictures of this size, smooth and noisy."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[: geometry.height_px, : geometry.width_px]
    smooth = np.stack([rows * 2, columns * 2, rows + columns], -1) % 256
    noisy = rng.integers(0, 256, smooth.shape)
    return [Image.fromarray(values.astype(np.uint8)) for values in (smooth, noisy)]


def image_to_image(name: str, vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    """`prepare_latents` of an image-to-image pipeline; its scheduler adds no noise."""
    own = SimpleNamespace(
        vae=vae,
        scheduler=SimpleNamespace(scale_noise=lambda latents, timestep, noise: latents),
        vae_scale_factor=8,
        latent_channels=vae.config.latent_channels,
    )
    prepare = getattr(diffusers, name).prepare_latents
    if name == "StableDiffusion3Img2ImgPipeline":
        return prepare(own, frames, None, len(frames), 1, EXACT, CPU)
    return prepare(own, frames, None, len(frames), own.latent_channels, *frames.shape[2:], EXACT, CPU, None)


def flux(vae: Any, frames: Tensor, model: DiffusionModel, pipeline: Any = diffusers.FluxImg2ImgPipeline) -> Tensor:
    latents = pipeline._encode_vae_image(SimpleNamespace(vae=vae), frames, None)
    return pipeline._pack_latents(latents, *latents.shape)


def qwen_image(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    own: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
    latents = diffusers.QwenImageEditPipeline._encode_vae_image(own, frames.unsqueeze(2), None)  # type: ignore[arg-type]
    return diffusers.QwenImageEditPipeline._pack_latents(latents, *latents.shape[:2], *latents.shape[3:])


def qwen_image21(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    """Latents of pictures with an opacity of 1, which the pipeline gives them."""
    own: Any = SimpleNamespace(vae=vae, latent_channels=vae.config.z_dim)
    opaque = torch.cat([frames, torch.ones_like(frames[:, :1])], dim=1).unsqueeze(2)
    latents = diffusers.QwenImage21Pipeline._encode_vae_image(own, opaque, None)  # type: ignore[arg-type]
    return diffusers.QwenImage21Pipeline._pack_latents(latents, *latents.shape[:2], *latents.shape[3:])


def wan(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    own: Any = SimpleNamespace(
        vae=vae,
        vae_scale_factor_temporal=vae.config.scale_factor_temporal,
        vae_scale_factor_spatial=vae.config.scale_factor_spatial,
        config=SimpleNamespace(expand_timesteps=True),
    )
    prepare = diffusers.WanImageToVideoPipeline.prepare_latents
    height, width = frames.shape[2:]
    return torch.cat(
        [prepare(own, one, 1, vae.config.z_dim, height, width, 1, EXACT, CPU)[1] for one in frames.split(1)]
    )


def hunyuan_video(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    own: Any = SimpleNamespace(
        vae=vae,
        vae_scaling_factor=vae.config.scaling_factor,
        vae_scale_factor_temporal=vae.temporal_compression_ratio,
        vae_scale_factor_spatial=vae.spatial_compression_ratio,
    )
    prepare = diffusers.HunyuanVideoImageToVideoPipeline.prepare_latents
    channels = vae.config.latent_channels
    return prepare(own, frames, len(frames), channels, *frames.shape[2:], 1, EXACT, CPU)[1]


def hunyuan_video15(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    pipeline = diffusers.HunyuanVideo15ImageToVideoPipeline
    processor: Any = SimpleNamespace(preprocess=lambda image, height, width: image)
    each = [pipeline._get_image_latents(vae, processor, one, 0, 0, CPU) for one in frames.split(1)]  # type: ignore[arg-type]
    return torch.cat(each)


def flux2(vae: Any, frames: Tensor, model: DiffusionModel) -> Tensor:
    own: Any = SimpleNamespace(vae=vae, _patchify_latents=diffusers.Flux2KleinPipeline._patchify_latents)
    grid = diffusers.Flux2KleinPipeline._encode_vae_image(own, frames, None)  # type: ignore[arg-type]
    return diffusers.Flux2KleinPipeline._pack_latents(grid)


PIPELINES: dict[str, Callable[[Any, Tensor, DiffusionModel], Tensor]] = {
    "Flux2KleinPipeline": flux2,
    "FluxKontextPipeline": lambda *given: flux(*given, pipeline=diffusers.FluxKontextPipeline),
    "FluxPipeline": flux,
    "HunyuanVideoPipeline": hunyuan_video,
    "HunyuanVideo15ImageToVideoPipeline": hunyuan_video15,
    "HunyuanVideo15Pipeline": hunyuan_video15,
    "QwenImage21Pipeline": qwen_image21,
    "QwenImageEditPipeline": qwen_image,
    "QwenImageEditPlusPipeline": qwen_image,
    "QwenImagePipeline": qwen_image,
    "StableDiffusion3Pipeline": lambda *given: image_to_image("StableDiffusion3Img2ImgPipeline", *given),
    "WanImageToVideoPipeline": wan,
    "WanPipeline": wan,
    "ZImagePipeline": lambda *given: image_to_image("ZImageImg2ImgPipeline", *given),
}
"""Our pipeline -> latents that the one with a picture as input makes of frames [B, 3, H, W]."""


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Image-to-image pipelines draw from the posterior; training wants its mode."""
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", lambda self, generator=None: self.mode())


@pytest.fixture
def in_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    """No VAE is kept in fp32, which some pipelines ask for."""
    monkeypatch.setattr(DiffusionModel, "decoder_dtype", lambda self, dtype: dtype)


@torch.no_grad()
def test_a_pictures_latents_are_those_of_the_diffusers_pipeline(
    loaded: Loaded, without_noise: None, in_fp64: None
) -> None:
    """Compare with an unchanged VAE, one picture at a time and both together; decode what was encoded."""
    decoder = loaded.model.load_decoder(EXACT, CPU)
    if loaded.model.spec.audio_parts:
        with pytest.raises(ValueError, match="a picture must come with its sound for"):
            decoder.encode(torch.zeros(1, 64, 96, 3, dtype=torch.uint8))
        return
    pixels = torch.stack([fitted(picture, PICTURE) for picture in pictures(PICTURE)])
    processed = diffusers.VideoProcessor().preprocess(pictures(PICTURE))  # type: ignore[arg-type]
    assert torch.equal(from_pixels(pixels, CPU, torch.float32), processed)
    vae = deepcopy(loaded.pipeline.vae).double()
    expected = PIPELINES[loaded.model.pipeline](vae, from_pixels(pixels, CPU, EXACT), loaded.model)
    latents = decoder.encode(pixels)
    assert latents.shape == (2, *loaded.model.latent_shape(PICTURE)) and latents.std() > 0.1
    torch.testing.assert_close(latents, expected, atol=1e-9, rtol=0)
    torch.testing.assert_close(torch.cat([decoder.encode(one) for one in pixels.split(1)]), latents, atol=1e-9, rtol=0)
    assert decoder(latents, PICTURE).pixels.shape == pixels.shape


def test_a_video_has_the_latents_that_its_size_says(loaded: Loaded) -> None:
    if not loaded.case.is_video or loaded.model.spec.audio_parts:
        pytest.skip("a model of pictures, or of videos with sound")
    decoder = loaded.model.load_decoder(EXACT, CPU)
    for size in loaded.case.sizes:
        geometry = replace(size, sources=())
        shape = (1, geometry.num_frames, geometry.height_px, geometry.width_px, 3)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        latents = decoder.encode(pixels)
        assert latents.shape == (1, *loaded.model.latent_shape(geometry))
        assert decoder(latents, geometry).pixels.shape == shape


def test_pixels_come_back_from_the_range_of_the_vae() -> None:
    pixels = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16, 1).expand(1, 16, 16, 3)
    assert torch.equal(to_pixels(from_pixels(pixels, CPU, torch.float32)).pixels, pixels)


@pytest.mark.parametrize("shape", [(4, 3, 8, 8), (4, 3, 2, 8, 8)], ids=["pictures", "videos"])
def test_one_value_that_is_not_finite_marks_its_picture(shape: tuple[int, ...]) -> None:
    frames = torch.full(shape, 6e4, dtype=torch.float16)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        frames[row].view(-1)[77] = value
    assert to_pixels(frames).is_finite.tolist() == [False, False, False, True]


def test_a_model_file_without_a_decoder_is_told_for_another_vae(tmp_path: Path) -> None:
    model = load_model(build_tiny("sd3", tmp_path / "m"))
    model.index["vae"] = ["diffusers", "AutoencoderKLWan"]
    with pytest.raises(ValueError, match=r"StableDiffusion3 must define load_decoder, .* got 'AutoencoderKLWan'"):
        model.load_decoder(torch.float32, CPU)


def test_a_vae_without_a_shift_decodes_and_encodes(tmp_path: Path) -> None:
    image_vae(scaling_factor=0.5, shift_factor=None).save_pretrained(tmp_path)
    decoder = load_image_decoder(tmp_path, torch.float32, CPU)
    (vae,) = decoder.modules
    latents = torch.randn(1, LATENT_CHANNELS, 8, 8)
    made = decoder.decode(latents, Geometry(64, 64)).pixels
    assert made.equal(to_pixels(vae.decode(latents / 0.5, return_dict=False)[0]).pixels)
    assert decoder.encode(made).equal(0.5 * posterior_mode(vae, from_pixels(made, CPU, torch.float32)))


@pytest.mark.parametrize("size", [(96, 64), (192, 128), (200, 64), (96, 300), (48, 32)], ids=str)
def test_a_picture_of_another_size_is_scaled_to_cover_and_its_middle_is_kept(size: tuple[int, int]) -> None:
    """Draw a white disc in the middle on black, and look where it is after scaling and cropping."""
    rows, columns = np.mgrid[: size[1], : size[0]]
    radius = min(size) / 4
    inside = (rows - size[1] / 2 + 0.5) ** 2 + (columns - size[0] / 2 + 0.5) ** 2 < radius**2
    picture = Image.fromarray(np.repeat(inside[..., None] * np.uint8(255), 3, -1))
    found = fitted(picture, PICTURE)
    assert found.shape == (64, 96, 3) and found.dtype == torch.uint8
    scale = max(64 / size[1], 96 / size[0])
    weights = found[..., 0].float() / 255
    assert weights.sum() == pytest.approx(np.pi * (radius * scale) ** 2, rel=0.05)  # neither stretched nor squeezed
    rows, columns = torch.arange(64.0), torch.arange(96.0)
    assert (weights.sum(1) @ rows / weights.sum()).item() == pytest.approx(31.5, abs=0.6)
    assert (weights.sum(0) @ columns / weights.sum()).item() == pytest.approx(47.5, abs=0.6)
