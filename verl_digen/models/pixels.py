# SPDX-License-Identifier: Apache-2.0
"""Decoders, and the conversion between a VAE's frames and 8-bit pixels, as by diffusers' processors.

Pictures become 8-bit pixels a few at a time (`in_batches`), and a video before the next one is decoded: peak memory is
these few pictures, or one video, and the pixels of the batch. Pixels equal the model's own pipeline, in batches of any
size, up to values at the edge of rounding.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from verl_digen.hardware.transfers import HostCopies, to_device
from verl_digen.inputs.audio import Audio
from verl_digen.types import Geometry

logger = logging.getLogger(__name__)

TILE_PX = 512
"""Largest side of a tile of VAEs of pictures whose own is the size that they were trained on, 1024 px; diffusers gives
others tiles of 256 or 512 px."""


class Decoded(NamedTuple):
    """B pictures or videos, as `to_pixels` makes them."""

    pixels: Tensor
    """uint8 [B, H, W, 3], or [B, F, H, W, 3] of videos; what was not finite is 0 or 255."""
    is_finite: Tensor
    """[B] bool: every value of the VAE was."""


@dataclass(frozen=True)
class Decoder:
    """Packed latents [B, ...] -> pictures or videos, on the CPU."""

    decode: Callable[[Tensor, Geometry], Decoded]
    """Function that leaves the pixels on the VAE's device and does not wait for it."""
    modules: tuple[nn.Module, ...]
    encode: Callable[[Tensor], Tensor]
    """The way back: uint8 pixels of a size that the model makes -> packed latents [B, ...] on the
    VAE's device, in its dtype. The mode of the VAE's posterior, without noise."""

    @torch.no_grad()
    def in_memory(self, latents: Tensor, geometry: Geometry) -> Decoded:
        """`decode` in what memory there is: what runs out of it, one by one, and one that does, in tiles.
        torch.OutOfMemoryError if one in tiles does not fit, or the VAE has none."""
        try:
            return self.decode(latents, geometry)
        except torch.OutOfMemoryError:
            if len(latents) == 1 and not self._take_tiles():
                raise
        # here, where the error holds no tensors any more
        if len(latents) == 1:
            return self.decode(latents, geometry)
        return in_batches(self.in_memory, latents, geometry, 1)

    def _take_tiles(self) -> bool:
        """Make the VAE decode in tiles from now on; False if it has none, or does so already."""
        vaes: list[Any] = [vae for vae in self.modules if getattr(vae, "use_tiling", None) is False]
        for vae in vaes:
            vae.enable_tiling()
            if hasattr(vae, "tile_latent_min_size"):
                px_per_position = vae.tile_sample_min_size // vae.tile_latent_min_size
                vae.tile_sample_min_size = min(vae.tile_sample_min_size, TILE_PX)
                vae.tile_latent_min_size = vae.tile_sample_min_size // px_per_position
            logger.warning(
                "one sample ran out of memory while it was decoded: from now on in tiles, whose blended seams change "
                "pixels; smaller samples (digen.sampling), or more free memory, are decoded whole"
            )
        return bool(vaes)

    def __call__(self, latents: Tensor, geometry: Geometry) -> Decoded:
        decoded = self.in_memory(latents, geometry)
        copies = HostCopies(decoded.pixels.device)
        on_host = Decoded(*map(copies.begin, decoded))
        copies.end()
        copies.wait()
        return on_host


@dataclass(frozen=True)
class AudioDecoder:
    """Packed latents [B, ...] -> the sound of each sample; None for each where the model makes none."""

    decode: Callable[[Tensor, Geometry], Sequence[Audio | None]]
    modules: tuple[nn.Module, ...]

    @torch.no_grad()
    def __call__(self, latents: Tensor, geometry: Geometry) -> Sequence[Audio | None]:
        return self.decode(latents, geometry)


SILENT = AudioDecoder(lambda latents, geometry: [None] * len(latents), ())
"""Decoder of a model that makes pictures alone."""


def to_pixels(frames: Tensor) -> Decoded:
    """[B, 3, H, W] or [B, 3, F, H, W] in [-1, 1] -> uint8 with channels last, on the same device."""
    of_each = tuple(range(1, frames.ndim))
    is_finite = frames.amin(of_each).isfinite() & frames.amax(of_each).isfinite()  # NaN is both; copies no frames
    in_unit_range = (frames * 0.5 + 0.5).clamp(0, 1).float()
    return Decoded((in_unit_range.movedim(1, -1) * 255).round().to(torch.uint8), is_finite)


def from_pixels(pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The way back: uint8 [B, H, W, 3] or [B, F, H, W, 3] -> channels second, in [-1, 1], on `device`."""
    return to_device(pixels, device).movedim(-1, 1).to(torch.float32).div(255).mul(2).sub(1).to(dtype)


def fitted(picture: Image.Image, geometry: Geometry) -> Tensor:
    """uint8 [H, W, 3] of the run's size: scaled (Lanczos) until it covers the size, then the middle of it."""
    from diffusers.image_processor import VaeImageProcessor

    resized: Any = VaeImageProcessor().resize(picture, geometry.height_px, geometry.width_px, resize_mode="crop")
    return torch.from_numpy(np.array(resized))


def posterior_mode(vae: Any, frames: Tensor) -> Tensor:
    """Latents [B, C, ...] of frames in [-1, 1], before they are normalised: diffusers' `sample_mode="argmax"`."""
    return vae.encode(frames, return_dict=False)[0].mode()


def encode_each(vae: Any, pixels: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Encode one video after the other, uint8 [B, F', H', W', 3], or [B, H', W', 3] of one frame -> [B, C, F, H, W],
    before they are normalised."""
    videos = pixels.unsqueeze(1) if pixels.ndim == 4 else pixels
    return torch.cat([posterior_mode(vae, from_pixels(one, device, dtype)) for one in videos.split(1)])


def in_batches(
    decode: Callable[[Tensor, Geometry], Decoded], latents: Tensor, geometry: Geometry, batch_size: int
) -> Decoded:
    """All `latents` [B, ...], decoded at most `batch_size` (`digen.rollout.decode_batch_size`) at a time."""
    return joined([decode(part, geometry) for part in latents.split(batch_size)])


def joined(parts: Sequence[Decoded]) -> Decoded:
    """Parts of a batch as one."""
    return Decoded(*map(torch.cat, zip(*parts, strict=True)))


def decode_each(vae: Any, latents: Tensor) -> Decoded:
    """Decode one video after the other, [B, C, F, H, W] -> uint8 [B, F', H', W', 3], or [B, H', W', 3] of one frame."""
    videos = joined([to_pixels(vae.decode(one, return_dict=False)[0]) for one in latents.split(1)])
    return videos._replace(pixels=videos.pixels.squeeze(1))


def video_decoder(
    vae: Any, dtype: torch.dtype, device: torch.device, inverse_std: Tensor | float, mean: Tensor | float = 0.0
) -> Decoder:
    """The decoder of a VAE of videos, which moves to `device`. `inverse_std`, `mean`: statistics by which the network's
    latents are normalised."""
    vae.eval().to(device)

    def decode(latents: Tensor, geometry: Geometry) -> Decoded:
        return decode_each(vae, latents.to(device, dtype) / inverse_std + mean)

    def encode(pixels: Tensor) -> Tensor:
        return (encode_each(vae, pixels, device, dtype) - mean) * inverse_std

    return Decoder(decode, (vae,), encode)


def channel_statistics(vae: Any, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """(1 / standard deviation, mean) of a VAE's latents, each [1, C, 1, 1, 1]."""
    mean, std = (
        torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1).to(device, dtype)
        for name in ("latents_mean", "latents_std")
    )
    return 1.0 / std, mean


def decode_in(vae: Any, dtype: torch.dtype) -> None:
    """Make a loaded VAE decode in `dtype`, whatever the latents' dtype; for pipelines that are not ours."""
    vae.to(dtype)
    decode = vae.decode

    def decode_cast(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        return decode(latents.to(dtype), *args, **kwargs)

    vae.decode = decode_cast


def load_image_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    unpack: Callable[[Tensor, Geometry], Tensor] = lambda latents, geometry: latents,
    pack: Callable[[Tensor], Tensor] = lambda latents: latents,
) -> Decoder:
    """Load the decoder of a model whose VAE is diffusers' `AutoencoderKL`. `unpack`: latents as the transformer reads
    them -> [B, C, H, W]. `pack`: the way back."""
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    vae: Any = AutoencoderKL.from_pretrained(folder, dtype=dtype)
    vae.eval().to(device)
    shift = vae.config.shift_factor or 0.0

    def decode(latents: Tensor, geometry: Geometry) -> Decoded:
        unpacked = unpack(latents, geometry).to(device, dtype)
        denormalised = unpacked / vae.config.scaling_factor + shift
        return to_pixels(vae.decode(denormalised, return_dict=False)[0])

    def encode(pixels: Tensor) -> Tensor:
        # `_encode_vae_image` of the image-to-image pipelines.
        latents = posterior_mode(vae, from_pixels(pixels, device, dtype))
        return pack((latents - shift) * vae.config.scaling_factor)

    return Decoder(decode, (vae,), encode)
