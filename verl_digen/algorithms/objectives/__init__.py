# SPDX-License-Identifier: Apache-2.0
"""Policy losses over rows, by name; one file each. What each loss is per row: docs/algorithms/objectives.md.

| column [N] | meaning |
| --- | --- |
| `log_prob` (p) | of the row under the weights that train, differentiable |
| `behaviour_log_prob` (p) | under the policy that generated the sample, recorded at generation |
| `old_log_prob` (p) | under the policy before the update; `denominator` chooses its source |
| `advantage` | of the row's sample |
| `reward` | of the row's sample: the weighted sum over the reward functions, not centred |
| `std` (p) | of the step's Gaussian, sqrt(-dt) included |
| `noise_rate` (p) | s of the step: std without sqrt(-dt), under law cps std |
| `sigma` | noise level of the latents that the network reads |
| `sigma_next` (p) | noise level of x' |
| `sigma_max` (p) | second noise level of the schedule, for a row whose `sigma` is 1 |
| a joint column | made of all rows of the fragment, see `objective.Joint` |

| latents [N, ...] | meaning |
| --- | --- |
| `latents`, `next_latents` (p) | x and x' of the recorded step |
| `clean`, `noise`, `noisy` (f) | x_0, its noise, and (1 - sigma) x_0 + sigma noise |
| `mean` (p) | of the step's Gaussian under the weights that train, differentiable |
| `velocity` | the network's guided prediction under these weights, differentiable |
| `old_...`, `reference_...`, `teacher_...` | `mean` and `velocity` under that policy, without gradient |

(p) recorded transitions, (f) clean latents noised again. Log-probs are means over latent dims, so ratios are near 1 and
bounds that are wide for tokens seldom bind here.

Invariants (tests/algorithms/test_losses.py): losses reduce with `LossInputs.mean` only, so they add up over tiles and
fragments. A loss registered as `homogeneous` is, while advantages are not clamped, positively homogeneous in the
advantage, loss(c A) = c loss(A) for c > 0. So the scale of advantages may be applied to an accumulated gradient
instead, and `digen.advantage.scale=batch` does not make training wait for the whole batch's rewards.
"""

import importlib
import pkgutil

from verl_digen.algorithms.objectives.denominator import OLD_LOG_PROBS, Denominator, choose_denominator, clips_recorded
from verl_digen.algorithms.objectives.objective import (
    ClampedConfig,
    ClipConfig,
    Joint,
    JointRows,
    LossConfig,
    Objective,
    Select,
    all_samples,
    best_and_worst,
    default_config,
    find_objective,
    objective_names,
    policy_loss,
    register_objective,
)
from verl_digen.algorithms.rows import LossInputs, LossOutput

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")  # a file registers its objective

__all__ = [
    "OLD_LOG_PROBS",
    "ClampedConfig",
    "ClipConfig",
    "Denominator",
    "Joint",
    "JointRows",
    "LossConfig",
    "LossInputs",
    "LossOutput",
    "Objective",
    "Select",
    "all_samples",
    "best_and_worst",
    "choose_denominator",
    "clips_recorded",
    "default_config",
    "find_objective",
    "objective_names",
    "policy_loss",
    "register_objective",
]
