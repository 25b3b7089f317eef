# SPDX-License-Identifier: Apache-2.0
"""Evaluate rows under the weights that train, and without gradient under other policies, by name.

| policy | weights |
| --- | --- |
| `reference` | a copy of the initial weights; of a new LoRA without one, the adapter switched off |
| `old` | a copy, see `verl_digen.engine.copies`; without one, the policy that trains |
| `teacher` | a copy of the adapter with the teacher's weights, see `verl_digen.engine.teacher` |

A copy is swapped in once for all tiles of a call, and results are kept on the host; the adapter is switched off tile by
tile.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from verl_digen.algorithms.sde import SdeStep
from verl_digen.engine.copies import ShadowWeights
from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.sampler import row_velocity, score_rows
from verl_digen.types import Noised, TrainingRows

Outputs = Mapping[str, Tensor]
"""Outputs of one policy on N rows, by the names of `verl_digen.algorithms.objectives`."""


@dataclass(frozen=True)
class Evaluated:
    """N rows under one policy."""

    velocity: Tensor
    """[N, ...] fp32: the guided prediction."""
    step: SdeStep | None = None
    """The recorded steps under this policy; None for forward points."""

    @property
    def log_prob(self) -> Tensor:
        """[N] fp32, of path points."""
        assert self.step is not None
        return self.step.log_prob

    def tensors(self) -> dict[str, Tensor]:
        """Outputs by the names of `verl_digen.algorithms.objectives`."""
        if self.step is None:
            return {"velocity": self.velocity}
        step = self.step
        return {"velocity": self.velocity, "log_prob": step.log_prob, "mean": step.mean, "std": step.std}

    def outputs(self, names: Sequence[str]) -> dict[str, Tensor]:
        """These outputs, without gradient."""
        tensors = self.tensors()
        return {name: tensors[name].detach() for name in names}


class PolicyForward:
    """Evaluates rows with the module's weights, whatever they are. The engine adds and removes `copies`, by policy."""

    def __init__(
        self,
        model: DiffusionModel,
        module: nn.Module,
        device: torch.device,
        copies: Mapping[str, ShadowWeights],
        has_bare_reference: bool,
    ):
        self.model, self.module, self.device = model, module, device
        self.copies, self.has_bare_reference = copies, has_bare_reference

    def __call__(self, rows: TrainingRows) -> Evaluated:
        """Evaluate rows on the device; differentiable if gradients are enabled."""
        if isinstance(rows.point, Noised):
            return Evaluated(row_velocity(self.model, self.module, rows))
        step, velocity = score_rows(self.model, self.module, rows)
        return Evaluated(velocity, step)

    def others(
        self, wanted: Mapping[str, Sequence[str]], tiles: Sequence[Callable[[], TrainingRows]]
    ) -> Iterator[dict[str, Outputs]]:
        """Outputs of other policies on each tile, in order: policy -> outputs. `tiles` are functions that make a tile's
        rows, on the device.

        `wanted` names the outputs of each policy that are read. `old` without a copy is left out: it is the policy that
        trains.
        """
        present = {policy: names for policy, names in wanted.items() if policy in self.copies or policy != "old"}
        columns = {policy: self._of_policy(policy, names, tiles) for policy, names in present.items()}
        for _ in tiles:
            yield {policy: next(outputs) for policy, outputs in columns.items()}

    @torch.no_grad()
    def _of_policy(
        self, policy: str, names: Sequence[str], tiles: Sequence[Callable[[], TrainingRows]]
    ) -> Iterator[Outputs]:
        copy = self.copies.get(policy)
        if copy is None:
            assert policy == "reference" and self.has_bare_reference
            return self._without_adapter(names, tiles)
        with copy.swapped_in(self.module):
            waiting = [moved(self(rows()).outputs(names), "cpu") for rows in tiles]
        return (moved(outputs, self.device) for outputs in waiting)

    def _without_adapter(self, names: Sequence[str], tiles: Sequence[Callable[[], TrainingRows]]) -> Iterator[Outputs]:
        for rows in tiles:
            with torch.no_grad(), without_adapter(self.module):
                outputs = self(rows()).outputs(names)
            yield outputs


def moved(outputs: Outputs, device: torch.device | str) -> Outputs:
    """Copy of the outputs on `device`."""
    return {name: to_device(value, torch.device(device)) for name, value in outputs.items()}


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Context in which forwards skip the adapter. peft's own context also switches `requires_grad`: with
    `reshard_after_forward=false` off on the shards at entry and on again on the gathered parameters at exit, and the
    adapter never trains again."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
