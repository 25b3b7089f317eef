# SPDX-License-Identifier: Apache-2.0
"""Loaded parts of a pipeline besides the transformer: functions that name the modules they run.

A replica frees the modules' device memory while it sleeps (`verl_digen.platforms.module_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from verl_digen.audio import Audio
from verl_digen.inputs import PromptInputs
from verl_digen.types import Condition, Geometry


@dataclass(frozen=True)
class PromptEncoder:
    """Texts, with images where the pipeline reads them -> one condition each, on the encoder's device."""

    encode: Callable[[Sequence[PromptInputs]], list[Condition]]
    modules: tuple[nn.Module, ...]

    def __call__(self, prompts: Sequence[PromptInputs]) -> list[Condition]:
        return self.encode(prompts)


@dataclass(frozen=True)
class Decoder:
    """Packed latents [B, ...] -> pixels uint8 [B, H, W, 3] (image) or [B, F, H, W, 3] (video), on the CPU."""

    decode: Callable[[Tensor, Geometry], Tensor]
    """Function that leaves the pixels on the VAE's device and does not wait for it."""
    modules: tuple[nn.Module, ...]
    encode: Callable[[Tensor], Tensor]
    """The way back: pixels as `decode` gives them, of a size that the model makes -> packed latents [B, ...] on the
    VAE's device, in its dtype. The mode of the VAE's posterior, without noise."""

    def __call__(self, latents: Tensor, geometry: Geometry) -> Tensor:
        return self.decode(latents, geometry).cpu()


@dataclass(frozen=True)
class AudioDecoder:
    """Packed latents [B, ...] -> the sound of each sample; None for each where the model makes none."""

    decode: Callable[[Tensor, Geometry], Sequence[Audio | None]]
    modules: tuple[nn.Module, ...]

    def __call__(self, latents: Tensor, geometry: Geometry) -> Sequence[Audio | None]:
        return self.decode(latents, geometry)


SILENT = AudioDecoder(lambda latents, geometry: [None] * len(latents), ())
"""Decoder of a model that makes pictures alone."""
