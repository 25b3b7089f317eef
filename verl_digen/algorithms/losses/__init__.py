# SPDX-License-Identifier: Apache-2.0
"""Policy losses over rows, by name.

* A loss is a function of checked `LossInputs` and a `LossConfig`. `register_loss` registers it by name with the
  inputs it needs; `policy_loss` looks it up, checks the inputs and calls it.
* Losses reduce with `LossInputs.mean` only, so they add up over tiles and fragments (see `rows`).

| column [N] | what |
| --- | --- |
| `log_prob` | of the row under the weights that train, differentiable |
| `behaviour_log_prob` | under the policy that generated the sample, recorded at generation |
| `old_log_prob` | under the policy before the update; `denominator` chooses its source |
| `trajectory_log_ratio` | mean of log_prob - behaviour_log_prob over the trained steps of the row's trajectory |
| `advantage` | of the row's sample |
| `reward` | of the row's sample: the weighted sum over the reward functions, not centred |
| `std` | of the step's Gaussian, sqrt(-dt) included |
| `dt` | sigma' - sigma of the step, < 0 |

| latents [N, ...] | what |
| --- | --- |
| `latents`, `next_latents` | x and x' of the recorded step |
| `mean` | of the step's Gaussian under the weights that train, differentiable |
| `velocity` | the network's guided prediction under these weights, differentiable |

Invariant: while `advantage_clip` does not bind, a loss registered as `homogeneous` is positively homogeneous in
the advantage, loss(c A) = c loss(A) for c > 0. So the scale of advantages may be applied to an accumulated gradient
instead, and `digen.advantage.scale=batch` does not make training wait for the whole batch's rewards.

Example, a custom loss:

    @register_loss("my_loss", columns=("log_prob", "advantage"), homogeneous=True)
    def my_loss(rows: LossInputs, config: LossConfig) -> LossOutput:
        return LossOutput(rows.mean(-rows["advantage"] * rows["log_prob"]), {})
"""

from verl_digen.algorithms.losses import clipped, off_policy  # noqa: F401 - they register their losses
from verl_digen.algorithms.losses.config import LossConfig
from verl_digen.algorithms.losses.denominator import OLD_LOG_PROBS, Denominator, choose_denominator
from verl_digen.algorithms.losses.registry import (
    is_homogeneous,
    is_off_policy,
    loss_inputs,
    loss_names,
    policy_loss,
    reads_trajectories,
    register_loss,
)
from verl_digen.algorithms.rows import LossInputs, LossOutput

__all__ = [
    "OLD_LOG_PROBS",
    "Denominator",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "choose_denominator",
    "is_homogeneous",
    "is_off_policy",
    "loss_inputs",
    "loss_names",
    "policy_loss",
    "reads_trajectories",
    "register_loss",
]
