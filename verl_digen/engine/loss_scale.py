# SPDX-License-Identifier: Apache-2.0
"""Dynamic loss scale of fp16 training: losses are multiplied by it, so that small gradients do not round to zero.

A gradient beyond 65504 overflows to infinity. Then the optimizer step is skipped and the scale halves; after
`GROWTH_STEPS` steps in a row without one it doubles.

`torch.amp.GradScaler` and FSDP's `ShardedGradScaler` do the same and do not fit the engine:

- The scale belongs to a logical batch: `abort` must leave it alone. A GradScaler marks gradients as unscaled until its
  next `update`, and refuses to unscale them again after a step that failed.
- They search all gradients for infinities and exchange the result. Here the gradient's norm is known on all ranks.
- verl makes one for the device "cuda", which switches itself off on every other device.

Invariants (tests/engine/test_loss_scale.py): a power of two, so that dividing by it is exact; the same on all ranks,
because it depends on the gradient's norm alone.

Example:
    scale = LossScale(8.0)
    scale.update(is_finite=False)   # 4.0: the step was skipped
    for _ in range(GROWTH_STEPS): scale.update(is_finite=True)  # 8.0
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 2.0**16
"""Scale of the first step, as in `torch.amp.GradScaler`, with which flow_grpo trains."""
LARGEST = 2.0**24
"""Largest scale; apex's."""
GROWTH_STEPS = 400
"""Steps in a row without overflow after which the scale doubles; verl's. PyTorch's 2000 are more than a run takes."""


@dataclass
class LossScale:
    """Loss scale, and its state between optimizer steps; only the engine changes it."""

    value: float = FIRST
    num_good_steps: int = 0
    """Optimizer steps since the last overflow or growth."""

    def update(self, *, is_finite: bool) -> None:
        """Record an optimizer step.

        Args:
            is_finite: False if its gradient was not, and the step was skipped.

        Raises:
            RuntimeError: gradients overflow without any scale.
        """
        if not is_finite:
            if self.value <= 1.0:
                raise RuntimeError(
                    "a gradient in fp16 must be finite at a loss scale of 1, got one that is not: the network itself "
                    "overflows, or its samples hold what is not a number; set "
                    "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16 and "
                    "actor_rollout_ref.rollout.dtype=bfloat16"
                )
            self.value, self.num_good_steps = self.value / 2, 0
            return
        self.num_good_steps += 1
        if self.num_good_steps == GROWTH_STEPS:
            self.value, self.num_good_steps = min(2 * self.value, LARGEST), 0
