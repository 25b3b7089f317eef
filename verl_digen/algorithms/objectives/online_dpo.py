# SPDX-License-Identifier: Apache-2.0
"""`online_dpo`: the best and the worst sample of a group as a preference pair. Needs final latents alone.

The loss is `verl_digen.algorithms.objectives.preference`. A group whose rewards are all equal has no pair, and trains
nothing.
"""

from verl_digen.algorithms.objectives.objective import register_objective
from verl_digen.algorithms.objectives.preference import DECLARED, DpoConfig, preference

register_objective("online_dpo", config=DpoConfig, **DECLARED)(preference)
