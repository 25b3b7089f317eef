# SPDX-License-Identifier: Apache-2.0
"""All rules, how they are run, and which of them a plan runs.

A plan is made before prompts, rewards and weights are there, and on another machine than the run. So it checks prompts
and rewards only where they are named, and neither the weights, nor the run's folders, nor the packages of a replica or
of a weight update.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from verl_digen.config import digen_config
from verl_digen.preflight import (
    adapter,
    agent_loop,
    effects,
    inputs,
    kernels,
    machine,
    model,
    pairs,
    pools,
    precision,
    recipes,
    reward_model,
    rewards,
    run_folder,
    unknown,
    values,
    verl_keys,
    weights,
)
from verl_digen.preflight.start_config import StartConfig
from verl_digen.reward.named import has_custom

Rule = Callable[[StartConfig], list[str] | None]
"""Raises ValueError for a problem, or returns several."""


RULES: tuple[Rule, ...] = (
    machine.check_versions,
    verl_keys.check_plugin,
    verl_keys.check_digen,
    pools.check_device,
    machine.check_machine,
    machine.check_address,
    machine.check_cpus,
    machine.check_trackers,
    unknown.unknown_problems,
    values.unused_problems,
    verl_keys.check_batches,
    verl_keys.check_shards,
    precision.check_precision,
    verl_keys.check_optimizer,
    verl_keys.check_callback,
    pools.check_mode,
    pools.check_rollout,
    pools.check_rollout_package,
    pools.check_vllm_omni,
    pools.check_weight_path,
    pools.check_weight_package,
    kernels.check_kernels,
    kernels.check_kernel_machine,
    pools.check_pools,
    effects.effect_problems,
    pools.check_placement,
    verl_keys.check_classes,
    run_folder.check_run_dir,
    run_folder.check_resume,
    model.check_model,
    kernels.check_kernel_model,
    weights.check_weights,
    model.check_model_section,
    adapter.check_adapter,
    inputs.check_prompts,
    inputs.check_validation,
    model.check_loss,
    adapter.check_teacher,
    pairs.check_pairs,
    agent_loop.check_agent_loop,
    agent_loop.check_branches,
    pools.check_outside,
    pools.check_generating_ranks,
    agent_loop.check_environment,
    rewards.check_reward_keys,
    rewards.check_rewards,
    reward_model.check_reward_model,
    rewards.check_latents,
    rewards.check_combination,
    rewards.check_group_rewards,
    rewards.check_reward_manager,
    rewards.check_reward_devices,
    rewards.check_timeshared,
    rewards.check_watching,
    run_folder.check_continued,
)
"""All rules, in the order in which their messages are shown, after the messages of `values`."""


def check(config: DictConfig, rules: Sequence[Rule] = RULES) -> StartConfig:
    """Apply `rules`, all by default -> the run, which may start.

    - Recipes that do not go together are reported alone: everything else follows from them.
    - A rule that reads a value of the wrong type or range is left out: the value's own message says what is wrong.

    Raises:
        ValueError: the messages of all rules that are broken, one line each.
    """
    recipes.check_recipes(config)
    wrong = values.value_problems(config)
    problems = [problem for problem in wrong.values() if problem is not None]
    run = StartConfig(_without(config, list(wrong)) if wrong else config)
    with flag_override(run.config, "readonly", True):
        for rule in rules:
            try:
                problems += rule(run) or []
            except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
                if not any(key in str(error) or error.full_key == key for key in wrong):
                    problems.append(_told(error))
            except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that leads nowhere
                problems.append(_told(error))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))
    return run


def _told(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    return f"{error.full_key} must have a value: {first}; set it" if error.full_key else first


def _without(config: DictConfig, keys: list[str]) -> DictConfig:
    """A copy in which reading one of `keys` raises `MissingMandatoryValue`."""
    usable = pickle.loads(pickle.dumps(config))  # faster than a copy
    with flag_override(usable, ["struct", "readonly"], False):
        for key in keys:
            OmegaConf.update(usable, key, "???", merge=False, force_add=True)
    return usable


OF_MODEL: tuple[Rule, ...] = (
    pools.check_vllm_omni,
    model.check_model,
    kernels.check_kernel_model,
    model.check_model_section,
    adapter.check_adapter,
)
"""Rules that read the checkpoint's configs."""
OF_RUN: tuple[Rule, ...] = (
    machine.check_machine,
    machine.check_address,
    machine.check_cpus,
    kernels.check_kernel_machine,
    run_folder.check_run_dir,
    run_folder.check_resume,
    run_folder.check_continued,
    weights.check_weights,
    pools.check_rollout_package,
    pools.check_weight_package,
)
"""Rules about the machine of the run."""
OF_REWARDS: tuple[Rule, ...] = (
    rewards.check_rewards,
    rewards.check_combination,
    rewards.check_group_rewards,
    rewards.check_timeshared,
    rewards.check_watching,
    rewards.check_latents,
    reward_model.check_reward_model,
)
"""Rules about the rewards that train."""


def check_plannable(config: DictConfig) -> None:
    """Run the rules that need no checkpoint.

    Raises:
        ValueError: the messages that a run would be refused with.
    """
    left_out = {*OF_MODEL, *OF_RUN}
    if OmegaConf.select(config, "data.train_files") is None:
        left_out.add(inputs.check_prompts)
    if not (digen_config(config).reward.entries or has_custom(config)):
        left_out |= {*OF_REWARDS}
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
