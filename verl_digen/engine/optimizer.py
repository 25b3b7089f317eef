# SPDX-License-Identifier: Apache-2.0
"""The optimizer step: Adam's in one kernel for many tensors (`fused=True` of PyTorch), where verl's settings leave that
open, and the loss scale of fp16.

`fused` or `foreach` in `actor_rollout_ref.actor.optim.override_optimizer_config` is the user's choice: `fused: false`
turns this off. A run continues a checkpoint of either kind.

Invariant (tests/engine/test_optimizer.py): weights equal PyTorch's loop over tensors, to rounding, also after a
checkpoint of the other kind.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor
from verl.workers.config import FSDPOptimizerConfig

FUSED, DEVICES = ("AdamW", "Adam"), ("cuda", "cpu")
"""Optimizers of `torch.optim` that are fused, and devices on which they are."""


def with_fused(config: FSDPOptimizerConfig, parameters: Iterable[Tensor]) -> FSDPOptimizerConfig:
    """verl's settings of the optimizer, with `fused=True` where that is possible and the user chose nothing."""
    given = dict(config.override_optimizer_config or {})
    is_adam = config.optimizer_impl == "torch.optim" and config.optimizer in FUSED
    has_kernel = all(one.device.type in DEVICES and one.is_floating_point() for one in parameters)
    if not (is_adam and has_kernel) or {"fused", "foreach", "differentiable"} & given.keys():
        return config
    return replace(config, override_optimizer_config=given | {"fused": True})


FIRST_SCALE = 2.0**16
"""Scale of the first step, as in `torch.amp.GradScaler`, with which flow_grpo trains."""
LARGEST_SCALE = 2.0**24
"""Largest scale; apex's."""
GROWTH_STEPS = 400
"""Steps in a row without overflow after which the scale doubles; verl's. PyTorch's 2000 are more than a run takes."""


@dataclass
class LossScale:
    """Dynamic loss scale of fp16 training: losses are multiplied by it, so that small gradients do not round to zero.

    A gradient beyond 65504 overflows to infinity. Then the optimizer step is skipped and the scale halves; after
    `GROWTH_STEPS` steps in a row without one it doubles. Only the engine changes it.

    `torch.amp.GradScaler` and FSDP's `ShardedGradScaler` do the same and do not fit the engine:

    - The scale belongs to a logical batch: `abort` must leave it alone. A GradScaler marks gradients as unscaled until
      its next `update`, and refuses to unscale them again after a step that failed.
    - They search all gradients for infinities and exchange the result. Here the gradient's norm is known on all ranks.
    - verl makes one for the device "cuda", which switches itself off on every other device.

    Invariants (tests/engine/test_loss_scale.py): a power of two, so that dividing by it is exact; the same on all
    ranks, because it depends on the gradient's norm alone.
    """

    value: float = FIRST_SCALE
    num_good_steps: int = 0
    """Optimizer steps since the last overflow or growth."""

    def update(self, *, is_finite: bool) -> None:
        """Record an optimizer step, which was skipped unless its gradient is finite. RuntimeError if gradients overflow
        without any scale."""
        if not is_finite:
            if self.value <= 1.0:
                raise RuntimeError(
                    "a gradient in fp16 must be finite at a loss scale of 1, got one that is not: the network itself "
                    "overflows, or its samples or what digen.loss.name returns hold what is not a number; set "
                    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16 and "
                    "actor_rollout_ref.rollout.dtype=bfloat16"
                )
            self.value, self.num_good_steps = self.value / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_STEPS:
            self.value, self.num_good_steps = min(2 * self.value, LARGEST_SCALE), 0
