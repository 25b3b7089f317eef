# SPDX-License-Identifier: Apache-2.0
"""Features of HunyuanVideo 1.5 only: quoted text in a prompt, a guider, checkpoints for other uses."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.models.transformers.transformer_hunyuan_video15 import HunyuanVideo15Transformer3DModel

from tests.models.cases import PROMPTS, Loaded, changed, record_inputs
from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.types import Geometry

CLIP = Geometry(32, 32, 5)
QUOTING = ('a sign that says "red" beside a “blue” one', 'the word "a" and the word "a" again')


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.tiny("hunyuan_video15", tmp_path_factory.mktemp("hunyuan_video15") / "m")


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a red circle", ""),
        ('a sign that says "red"', 'Text "red". '),
        (QUOTING[0], 'Text "red". Text "blue". '),
        (QUOTING[1], 'Text "a". '),
        ('an empty sign: ""', 'Text "". '),
        ('one quotation mark " alone', ""),
    ],
)
def test_glyphs_are_the_quoted_text(loaded: Loaded, prompt: str, read: str) -> None:
    (condition,) = loaded.encode([prompt])
    num_tokens = len(read.encode()) + 1 if read else 0
    assert condition["glyphs"].shape == (num_tokens, 32)
    assert condition["glyphs"].dtype == condition["embeds"].dtype


@pytest.mark.parametrize("prompts", [QUOTING, (QUOTING[0], PROMPTS[0])], ids=["all quote", "one quotes"])
def test_quoted_text_is_read_as_in_the_pipeline(loaded: Loaded, prompts: tuple[str, str]) -> None:
    """One forward of both rows, and one per row, against the pipeline's first step; its change of x is the velocity."""
    model, scale = loaded.model, 2.0
    start = torch.randn(2, *model.latent_shape(CLIP), generator=torch.Generator().manual_seed(0))
    sigmas = model.sigmas(1, CLIP)
    positives, negatives = loaded.encode(prompts), loaded.encode(['no "red"', " "])
    pipeline = loaded.pipeline
    pipeline.guider = pipeline.guider.new(guidance_scale=scale)
    made = pipeline(
        list(prompts),
        negative_prompt=['no "red"', " "],
        latents=start,
        height=CLIP.height_px,
        width=CLIP.width_px,
        num_frames=CLIP.num_frames,
        num_inference_steps=1,
        output_type="latent",
    )[0]

    def step(rows: slice) -> torch.Tensor:
        sigma, given = sigmas[0].expand(len(positives[rows])), (positives[rows], negatives[rows], scale)
        with torch.no_grad():
            velocity = model.velocity(loaded.transformer, start[rows], sigma, *given, CLIP)
        return start[rows] + (sigmas[1] - sigmas[0]) * velocity

    for found in (step(slice(0, 2)), torch.cat([step(slice(0, 1)), step(slice(1, 2))])):
        torch.testing.assert_close(found, made, atol=1e-5, rtol=0)
    without = loaded.encode([prompt.replace('"', "").replace("“", "") for prompt in prompts])
    differs = model.velocity(loaded.transformer, start, sigmas[:1].expand(2), without, negatives, scale, CLIP)
    assert (start - differs - made).abs().max() > 1e-3


def test_too_much_quoted_text_is_an_error_before_a_weight_is_read(loaded: Loaded) -> None:
    check = loaded.model.load_prompt_check()
    fits = 256 - len('Text "". ') - 1
    check(f'a sign: "{"x" * fits}"')
    for refuse in (check, lambda prompt: loaded.encode([prompt])):
        with pytest.raises(ValueError, match=r"quoted text .* at most 256 ByT5 tokens .* got 257 for 'a sign: .*data"):
            refuse(f'a sign: "{"x" * (fits + 1)}"')


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("transformer/config.json", {"use_meanflow": True}, r"use_meanflow=false for .*, got true in .*480p_t2v"),
        (
            "guider/guider_config.json",
            {"guidance_rescale": 0.7, "stop": 0.5},
            r"plain classifier-free guidance, got ClassifierFreeGuidance guidance_rescale=0.7 stop=0.5 in",
        ),
        ("guider/guider_config.json", {"use_original_formulation": True}, r"use_original_formulation=True"),
        (
            "model_index.json",
            {"guider": ["diffusers", "AdaptiveProjectedGuidance"]},
            "got AdaptiveProjectedGuidance in",
        ),
    ],
)
def test_a_checkpoint_for_another_use_is_an_error(
    loaded: Loaded, tmp_path: Path, file: str, change: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(changed(loaded.path, tmp_path / "m", file, change))


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("has_image", [False, True], ids=["text", "image"])
def test_gradients_are_those_of_the_networks_own_forward(
    loaded: Loaded, tmp_path: Path, has_image: bool, recomputes: bool
) -> None:
    """The original forward also has masked tokens of a first frame; without one its weights get no gradient."""
    if has_image:
        loaded = Loaded.tiny("hunyuan_video15_i2v", tmp_path / "m")
    model, geometry = loaded.model, loaded.case.sizes[0] if has_image else CLIP
    start = torch.randn(2, *model.latent_shape(geometry), generator=torch.Generator().manual_seed(0))
    network: Any = model.load_transformer(torch.float32)
    if recomputes:
        network.enable_gradient_checkpointing()
    calls, stop = record_inputs(network)
    given = (start, torch.tensor([0.9, 0.2]), loaded.encode([QUOTING[0], PROMPTS[0]]), None, 1.0)
    model.velocity(network, *given, geometry).square().sum().backward()
    stop()
    own: Any = HunyuanVideo15Transformer3DModel.from_pretrained(model.path / "transformer")
    frame = {} if has_image else {"image_embeds": torch.zeros(2, 729, own.config.image_embed_dim)}
    own(**calls[0], **frame, return_dict=False)[0].square().sum().backward()
    for name, expected in own.named_parameters():
        found = network.get_parameter(name)
        if found.grad is None:
            assert expected.grad is None or not expected.grad.count_nonzero(), name
        else:
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
    assert (network.image_embedder.linear_1.weight.grad is not None) == has_image
    assert network.context_embedder_2.linear_1.weight.grad is not None


class Tiled(Exception):
    """A VAE began to decode in tiles."""


@pytest.mark.parametrize(
    ("name", "vae"), [("hunyuan_video", AutoencoderKLHunyuanVideo), ("hunyuan_video15", AutoencoderKLHunyuanVideo15)]
)
def test_large_pictures_are_decoded_in_tiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, vae: type
) -> None:
    """A side of more than 256 px: the VAE's attention makes a mask of positions x positions."""

    def tiled_decode(*unused: Any, **also_unused: Any) -> None:
        raise Tiled

    monkeypatch.setattr(vae, "tiled_decode", tiled_decode)
    model = load_model(build_tiny(name, tmp_path / "m"))
    decode = model.load_decoder(torch.float32, torch.device("cpu"))
    with pytest.raises(Tiled):
        decode(torch.zeros(1, *model.latent_shape(Geometry(288, 32))), Geometry(288, 32))
