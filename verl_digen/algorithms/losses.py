# SPDX-License-Identifier: Apache-2.0
"""Policy losses as pure functions, by name: what each one needs and computes is in `verl_digen.algorithms.objectives`.

Example:
    config = dataclasses.replace(default_config("flow_grpo"), clip_range=1e-3)
    policy_loss("flow_grpo", {"log_prob": now, "old_log_prob": before, "advantage": advantages}, config).loss
"""

from verl_digen.algorithms.objectives import default_config, policy_loss

__all__ = ["default_config", "policy_loss"]
