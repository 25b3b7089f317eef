# SPDX-License-Identifier: Apache-2.0
"""Loaded parts of a pipeline besides the transformer: functions that name the modules they run. A replica frees the
modules' device memory while it sleeps (`verl_digen.platforms.module_memory`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from verl_digen.hardware.transfers import HostCopies
from verl_digen.inputs.audio import Audio
from verl_digen.inputs.images import PromptInputs
from verl_digen.types import Condition, Geometry

logger = logging.getLogger(__name__)

TILE_PX = 512
"""Largest side of a tile of VAEs of pictures whose own is the size that they were trained on, 1024 px; diffusers gives
others tiles of 256 or 512 px."""


@dataclass(frozen=True)
class PromptEncoder:
    """Texts, with images where the pipeline reads them -> one condition each, on the encoder's device."""

    encode: Callable[[Sequence[PromptInputs]], list[Condition]]
    modules: tuple[nn.Module, ...]

    def __call__(self, prompts: Sequence[PromptInputs]) -> list[Condition]:
        return self.encode(prompts)


class Decoded(NamedTuple):
    """B pictures or videos, as `verl_digen.models.pixels.to_pixels` makes them."""

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
        return Decoded(*map(torch.cat, zip(*(self.in_memory(one, geometry) for one in latents.split(1)), strict=True)))

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

    def __call__(self, latents: Tensor, geometry: Geometry) -> Sequence[Audio | None]:
        return self.decode(latents, geometry)


SILENT = AudioDecoder(lambda latents, geometry: [None] * len(latents), ())
"""Decoder of a model that makes pictures alone."""
