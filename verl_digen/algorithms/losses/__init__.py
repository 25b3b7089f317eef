# SPDX-License-Identifier: Apache-2.0
"""Policy losses over rows, by name.

* A loss is a function of checked `Rows` and a `LossConfig`. `register_loss` files it under its names with
  the inputs it needs; `policy_loss` looks it up, checks the inputs and calls it.
* Losses reduce with `Rows.mean` only, so they add up over tiles and fragments (see `rows`).

Invariant: while `advantage_clip` does not bind, a loss that is filed as `homogeneous` is positively homogeneous in
the advantage, loss(c A) = c loss(A) for c > 0. So the scale of advantages may be applied to an accumulated gradient
instead, and `digen.advantage.scale=batch` does not make training wait for the whole batch's rewards.

Example, a loss of one's own:

    @register_loss("my_loss", columns=("log_prob", "advantage"), homogeneous=True)
    def my_loss(rows: Rows, config: LossConfig) -> LossOutput:
        return LossOutput(rows.mean(-rows["advantage"] * rows["log_prob"]), {})
"""

from verl_digen.algorithms.losses import clipped  # noqa: F401 - files its losses
from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.losses.registry import (
    is_homogeneous,
    loss_inputs,
    loss_names,
    policy_loss,
    register_loss,
)
from verl_digen.algorithms.rows import LossOutput, Rows

__all__ = [
    "LossConfig",
    "LossOutput",
    "Rows",
    "is_homogeneous",
    "loss_inputs",
    "loss_names",
    "policy_loss",
    "register_loss",
]
