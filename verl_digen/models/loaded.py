# SPDX-License-Identifier: Apache-2.0
"""Loaded parts of a pipeline besides the transformer: functions that name the modules they run.

A replica frees the modules' device memory while it sleeps (`verl_digen.platforms.module_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from verl_digen.audio import Audio
from verl_digen.inputs import PromptInputs
from verl_digen.transfers import HostCopies
from verl_digen.types import Condition, Geometry


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

    def __call__(self, latents: Tensor, geometry: Geometry) -> Decoded:
        decoded = self.decode(latents, geometry)
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
