# SPDX-License-Identifier: Apache-2.0
"""Evaluate rows under the current weights, and under the reference policy of the KL term.

- The reference of a full fine-tune is a frozen copy of the initial weights, swapped in once for all tiles of a call;
  results are kept on the host. The reference of LoRA is the adapter switched off, tile by tile.
- Without a KL term (`digen.kl.coef=0`) no reference forward runs at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from verl_digen.algorithms.sde import SdeStep
from verl_digen.config import DigenConfig
from verl_digen.engine.loss import Reference
from verl_digen.engine.shadow import ShadowWeights
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.sampler import score_rows
from verl_digen.types import Geometry, TrainingRows


class PolicyForward:
    """Evaluates rows with the current weights of `module`.

    Args:
        start_weights: the frozen copy; None without a KL term, and with LoRA.
        has_adapter: whether `module` is a LoRA on a base.
    """

    def __init__(
        self,
        model: DiffusionModel,
        module: nn.Module,
        digen: DigenConfig,
        device: torch.device,
        start_weights: ShadowWeights | None,
        has_adapter: bool,
    ):
        self.model, self.module, self.digen, self.device = model, module, digen, device
        self.start_weights, self.has_adapter = start_weights, has_adapter

    def __call__(self, rows: TrainingRows) -> tuple[SdeStep, Tensor]:
        """(steps, guided velocity [N, ...] fp32) of rows on the device; differentiable if gradients are enabled."""
        sampling = self.digen.sampling
        return score_rows(
            self.model,
            self.module,
            rows,
            law=self.digen.sde.law,
            noise_level=self.digen.sde.noise_level,
            true_cfg_scale=sampling.true_cfg_scale,
            geometry=Geometry(sampling.height_px, sampling.width_px, sampling.num_frames),
            guidance_scale=sampling.guidance_scale,
        )

    def references(self, tiles: Sequence[Callable[[], TrainingRows]]) -> Iterator[Reference | None]:
        """The reference of each tile, in order; None without a KL term.

        Args:
            tiles: per tile a function that makes its rows, on the device.
        """
        if self.digen.kl.coef == 0:
            yield from (None for _ in tiles)
        elif self.start_weights is not None:
            with torch.no_grad(), self.start_weights.swapped_in(self.module):
                waiting = [self._reference(rows()).to("cpu") for rows in tiles]
            yield from (reference.to(self.device) for reference in waiting)
        else:
            for rows in tiles:
                with torch.no_grad(), without_adapter(self.module):
                    reference = self._reference(rows())
                yield reference

    def _reference(self, rows: TrainingRows) -> Reference:
        step, velocity = self(rows)
        return Reference(step.mean, velocity)


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Context in which forwards skip the adapter.

    peft's own context also switches `requires_grad`. With `reshard_after_forward=false` it switches it off on the
    shards at entry and on again on the gathered parameters at exit, and the adapter never trains again.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
