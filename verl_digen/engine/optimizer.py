# SPDX-License-Identifier: Apache-2.0
"""Adam's step in one kernel for many tensors (`fused=True` of PyTorch), where verl's settings leave that open.

- `actor_rollout_ref.actor.optim.override_optimizer_config` holds arguments of the optimizer. `fused`, `foreach` in it
  are the user's choice: `fused: false` turns this off.
- Fused are AdamW and Adam of `torch.optim`, on CUDA and CPU. Other devices may lack the kernel.
- A checkpoint holds these options, too, and the place of the step counters follows from them. `settle` gives a loaded
  optimizer its own options back, so that a run continues one of either kind.

Invariant (tests/engine/test_optimizer.py): weights equal PyTorch's loop over tensors, to rounding, also after a
checkpoint of the other kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor
from verl.workers.config import FSDPOptimizerConfig

FUSED = ("AdamW", "Adam")
"""Optimizers of `torch.optim` that are fused."""
DEVICES = ("cuda", "cpu")
"""Devices on which they are."""
CHOICES = frozenset({"fused", "foreach", "differentiable"})
"""Arguments that choose an implementation."""


def with_fused(config: FSDPOptimizerConfig, parameters: Iterable[Tensor]) -> FSDPOptimizerConfig:
    """verl's settings of the optimizer, with `fused=True` where that is possible and the user chose nothing."""
    given = dict(config.override_optimizer_config or {})
    is_adam = config.optimizer_impl == "torch.optim" and config.optimizer in FUSED
    if not is_adam or CHOICES & given.keys() or not can_fuse(parameters):
        return config
    return replace(config, override_optimizer_config=given | {"fused": True})


def can_fuse(parameters: Iterable[Tensor]) -> bool:
    """True if PyTorch has a fused kernel for all of these parameters."""
    return all(one.device.type in DEVICES and one.is_floating_point() for one in parameters)


def implementations(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The choice of implementation of each group of parameters, for `settle`."""
    return [{name: group[name] for name in CHOICES & group.keys()} for group in optimizer.param_groups]


def settle(optimizer: torch.optim.Optimizer, own: list[dict[str, object]]) -> None:
    """Give an optimizer that was loaded its own implementation back, and its step counters the place for that."""
    for group, choice in zip(optimizer.param_groups, own, strict=True):
        group.update(choice)
        if "fused" not in choice:
            continue
        for parameter in group["params"]:
            step = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(step, Tensor):
                place = parameter.device if choice["fused"] else torch.device("cpu")
                optimizer.state[parameter]["step"] = step.to(device=place, dtype=torch.float32)
