# SPDX-License-Identifier: Apache-2.0
"""Conversion between a VAE's frames and 8-bit pixels, as by diffusers' processors.

Pictures become 8-bit pixels a few at a time (`in_batches`), and a video before the next one is decoded: peak memory is
these few pictures, or one video, and the pixels of the batch. Pixels equal the model's own pipeline, in batches of any
size, up to values at the edge of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl_digen.hardware.transfers import to_device
from verl_digen.models.loaded import Decoded, Decoder
from verl_digen.types import Geometry


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

    @torch.no_grad()
    def decode(latents: Tensor, geometry: Geometry) -> Decoded:
        return decode_each(vae, latents.to(device, dtype) / inverse_std + mean)

    @torch.no_grad()
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

    @torch.no_grad()
    def decode(latents: Tensor, geometry: Geometry) -> Decoded:
        unpacked = unpack(latents, geometry).to(device, dtype)
        denormalised = unpacked / vae.config.scaling_factor + vae.config.shift_factor
        return to_pixels(vae.decode(denormalised, return_dict=False)[0])

    @torch.no_grad()
    def encode(pixels: Tensor) -> Tensor:
        # `_encode_vae_image` of the image-to-image pipelines.
        latents = posterior_mode(vae, from_pixels(pixels, device, dtype))
        return pack((latents - vae.config.shift_factor) * vae.config.scaling_factor)

    return Decoder(decode, (vae,), encode)
