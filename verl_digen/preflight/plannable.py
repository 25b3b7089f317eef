# SPDX-License-Identifier: Apache-2.0
"""The checks of a start that apply to a plan, too: all but those of files and folders that a plan needs none of.

A plan is made before prompts, rewards and weights are there, and on another machine than the run. So it checks prompts
and rewards only where they are named, and neither the weights, nor the run's folders, nor the packages of a replica or
of a weight update.
"""

from __future__ import annotations

import copy
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, flag_override

from verl_digen.config import digen_config
from verl_digen.preflight.adapter import check_adapter
from verl_digen.preflight.inputs import check_prompts
from verl_digen.preflight.kernels import check_kernel_machine, check_kernel_model
from verl_digen.preflight.machine import check_cpus, check_machine
from verl_digen.preflight.model import check_model, check_model_section
from verl_digen.preflight.paths import check_resume, check_run_dir
from verl_digen.preflight.pools import check_rollout_package, check_weight_package
from verl_digen.preflight.reward_model import check_reward_model
from verl_digen.preflight.rewards import (
    check_combination,
    check_group_rewards,
    check_latents,
    check_rewards,
    check_timeshared,
)
from verl_digen.preflight.rules import RULES, Rule, check
from verl_digen.preflight.run_folder import check_continued
from verl_digen.preflight.vllm_omni import check_vllm_omni
from verl_digen.preflight.watching import check_watching
from verl_digen.preflight.weights import check_weights
from verl_digen.reward.named import has_custom

OF_MODEL: tuple[Rule, ...] = (check_vllm_omni, check_model, check_kernel_model, check_model_section, check_adapter)
"""Rules that read the checkpoint's configs."""
OF_RUN: tuple[Rule, ...] = (
    check_machine,
    check_cpus,
    check_kernel_machine,
    check_run_dir,
    check_resume,
    check_continued,
    check_weights,
    check_rollout_package,
    check_weight_package,
)
"""Rules about the machine of the run."""


def check_plannable(config: DictConfig) -> None:
    """Run the rules that need no checkpoint.

    Raises:
        ValueError: the messages that a run would be refused with.
    """
    left_out = {*OF_MODEL, *OF_RUN}
    if OmegaConf.select(config, "data.train_files") is None:
        left_out.add(check_prompts)
    if not (digen_config(config).reward.entries or has_custom(config)):
        left_out |= {check_rewards, check_combination, check_group_rewards, check_timeshared, check_watching}
        left_out |= {check_reward_model, check_latents}
    check(config, [rule for rule in RULES if rule not in left_out])


def check_plannable_model(config: DictConfig, folder: Path) -> None:
    """Run the rules that read the checkpoint's configs.

    Args:
        folder: the checkpoint, with its configs at least.

    Raises:
        ValueError: the messages that a run would be refused with.
    """
    local = copy.deepcopy(config)
    with flag_override(local, ["struct", "readonly"], False):
        local.actor_rollout_ref.model.path = str(folder)
    check(local, OF_MODEL)
