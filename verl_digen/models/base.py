# SPDX-License-Identifier: Apache-2.0
"""What a model file provides: one subclass of `DiffusionModel` per architecture, nothing about algorithms.

- Everything heavy is loaded by an explicit call, so that a trainer rank loads only the transformer and a
  replica loads all of it. Constructing the object reads JSON configs alone.
- `velocity` is shared code: it runs both guidance branches in ONE forward and asks the subclass for
  `predict`, `guide` and `collate`.

Invariants (tests/models): rows at different sigmas in one forward equal one at a time; padding of text
changes nothing; our sampler with eta = 0 equals the model's own diffusers pipeline.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import ClassVar

import diffusers
import torch
from accelerate import init_empty_weights
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn

from verl_digen.types import Condition, Geometry

PromptEncoder = Callable[[Sequence[str]], list[Condition]]
"""Texts -> one condition each, on the encoder's device."""
Decoder = Callable[[Tensor, Geometry], Tensor]
"""Packed latents [B, ...] -> pixels uint8 [B, H, W, 3] (image) or [B, F, H, W, 3] (video), on the CPU."""


class DiffusionModel(ABC):
    """One architecture of the diffusers library, read from a checkpoint folder.

    Args:
        path: local folder of a diffusers-format checkpoint (with `model_index.json`).
    """

    architecture: ClassVar[str]
    """The transformer's class name in `model_index.json`, e.g. "QwenImageTransformer2DModel"."""
    lora_targets: ClassVar[tuple[str, ...]]
    """Module-name suffixes LoRA wraps when the user names none."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.compute_dtype: torch.dtype | None = None
        """What the network computes in, where its parameters do not say: the owner of a wrapper that casts
        (FSDP2 keeps fp32 shards and computes in its `param_dtype`) sets it once. None: as its parameters."""

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        """The transformer in eval mode on the CPU; `meta=True` gives the structure alone.

        With `meta=True` parameters are on the meta device, to be filled from `iter_weights`; buffers and
        tables that are no parameters are real, on the CPU, because no checkpoint holds them.
        """
        folder = self.path / "transformer"
        network = getattr(diffusers, self.architecture)
        if not meta:
            return network.from_pretrained(folder, dtype=dtype, low_cpu_mem_usage=True).eval()
        with init_empty_weights(include_buffers=False):
            return network.from_config(network.load_config(folder)).to(dtype).eval()

    def iter_weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The transformer's checkpoint, one (state-dict name, CPU tensor) at a time, floats cast to `dtype`.

        Files are mapped, not read whole: a consumer that keeps only its own shard of each tensor never holds
        more than one full tensor.

        Raises:
            ValueError: the folder has no safetensors, or lacks one its index names.
        """
        folder = self.path / "transformer"
        index = folder / SAFE_WEIGHTS_INDEX_NAME
        names = {SAFETENSORS_WEIGHTS_NAME}
        if index.is_file():
            names = set(json.loads(index.read_text())["weight_map"].values())
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ValueError(
                f"the transformer's weights must be safetensors, but {folder} lacks {', '.join(missing)}; "
                "complete the download, or save the checkpoint again with save_pretrained"
            )
        for name in sorted(names):
            with safe_open(folder / name, framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118 - not a dict
                    tensor = shard.get_tensor(key)
                    yield key, tensor.to(dtype) if tensor.is_floating_point() else tensor

    @abstractmethod
    def load_encoder(self, dtype: torch.dtype, device: torch.device) -> PromptEncoder:
        """Load tokenizer and text encoder."""

    @abstractmethod
    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Load the VAE."""

    # -- the shape of the problem -------------------------------------------------------------------------
    @abstractmethod
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """Shape of one sample's packed latents.

        Raises:
            ValueError: a size the architecture cannot produce; names the key, the value and the nearest valid
                one.
        """

    @abstractmethod
    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        """[T+1] fp32 CPU, decreasing from the first sigma to exactly 0: the checkpoint's own schedule."""

    # -- the network --------------------------------------------------------------------------------------
    @abstractmethod
    def collate(self, conditions: Sequence[Condition]) -> Condition:
        """Batch N conditions of different lengths: padded tensors [N, L, ...] and the masks it needs."""

    @abstractmethod
    def predict(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        condition: Condition,
        geometry: Geometry,
    ) -> Tensor:
        """One forward -> velocity [N, ...].

        Args:
            latents: [N, ...]. sigmas: [N] fp32, each row its own, on any device. condition: collated.
        """

    @abstractmethod
    def guide(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Combine the two guidance branches [N, ...] as the model's own pipeline does."""

    def input_dtype(self, transformer: nn.Module) -> torch.dtype:
        """The dtype to give the network its inputs in: what it computes in, whatever wraps it."""
        if self.compute_dtype is not None:
            return self.compute_dtype
        return next(parameter.dtype for parameter in transformer.parameters() if parameter.is_floating_point())

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        conditions: Sequence[Condition],
        negative_conditions: Sequence[Condition] | None,
        guidance_scale: float,
        geometry: Geometry,
    ) -> Tensor:
        """Guided velocity dx/dsigma [N, ...] fp32 of N rows, both branches in one forward.

        Args:
            latents: [N, ...]. sigmas: [N] fp32. conditions: N entries. negative_conditions: N entries; not
                read when `guidance_scale` is 1, which runs the positive branch alone.

        Raises:
            RuntimeError: guidance without negative conditions.
        """
        if guidance_scale != 1.0 and negative_conditions is None:
            raise RuntimeError(f"guidance_scale={guidance_scale} needs negative conditions, got None")
        if guidance_scale == 1.0 or negative_conditions is None:
            return self.predict(transformer, latents, sigmas, self.collate(conditions), geometry).float()
        both = self.collate([*conditions, *negative_conditions])
        branches = self.predict(transformer, torch.cat([latents, latents]), torch.cat([sigmas, sigmas]), both, geometry)
        positive, negative = branches.float().chunk(2)
        return self.guide(positive, negative, guidance_scale)
