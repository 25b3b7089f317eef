# SPDX-License-Identifier: Apache-2.0
"""All rules, and how they are run."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from verl_digen.config.load import read_only
from verl_digen.preflight.adapter import check_adapter
from verl_digen.preflight.agent_loop import check_agent_loop
from verl_digen.preflight.branches import check_branches
from verl_digen.preflight.classes import check_classes
from verl_digen.preflight.effect import effect_problems
from verl_digen.preflight.environment import check_environment
from verl_digen.preflight.inputs import check_prompts, check_validation
from verl_digen.preflight.kernels import check_kernel_machine, check_kernel_model, check_kernels
from verl_digen.preflight.machine import check_address, check_cpus, check_machine, check_trackers, check_versions
from verl_digen.preflight.model import check_loss, check_model, check_model_section
from verl_digen.preflight.outside import check_outside
from verl_digen.preflight.pairs import check_pairs
from verl_digen.preflight.paths import check_resume, check_run_dir
from verl_digen.preflight.pools import (
    check_device,
    check_mode,
    check_placement,
    check_pools,
    check_rollout,
    check_rollout_package,
    check_weight_package,
    check_weight_path,
)
from verl_digen.preflight.precision import check_precision
from verl_digen.preflight.recipes import check_recipes
from verl_digen.preflight.reward_model import check_reward_model
from verl_digen.preflight.rewards import (
    check_combination,
    check_group_rewards,
    check_latents,
    check_reward_devices,
    check_reward_keys,
    check_reward_manager,
    check_rewards,
    check_timeshared,
)
from verl_digen.preflight.run_folder import check_continued
from verl_digen.preflight.teacher import check_teacher
from verl_digen.preflight.unknown import unknown_problems
from verl_digen.preflight.unused import unused_problems
from verl_digen.preflight.values import value_problems
from verl_digen.preflight.verl_keys import (
    check_batches,
    check_callback,
    check_digen,
    check_optimizer,
    check_plugin,
    check_shards,
    check_storage,
    check_strategy,
)
from verl_digen.preflight.vllm_omni import check_vllm_omni
from verl_digen.preflight.watching import check_watching
from verl_digen.preflight.weights import check_weights

Rule = Callable[[DictConfig], None]


def _raising(problems_of: Callable[[DictConfig], list[str]]) -> Rule:
    """A rule that reports several problems at once."""

    def rule(config: DictConfig) -> None:
        if problems := problems_of(config):
            raise ValueError("\n".join(problems))

    return rule


RULES: tuple[Rule, ...] = (
    check_versions,
    check_plugin,
    check_digen,
    check_device,
    check_machine,
    check_address,
    check_cpus,
    check_trackers,
    _raising(unknown_problems),
    _raising(unused_problems),
    check_strategy,
    check_batches,
    check_shards,
    check_precision,
    check_optimizer,
    check_callback,
    check_storage,
    check_mode,
    check_rollout,
    check_rollout_package,
    check_vllm_omni,
    check_weight_path,
    check_weight_package,
    check_kernels,
    check_kernel_machine,
    check_pools,
    _raising(effect_problems),
    check_placement,
    check_classes,
    check_run_dir,
    check_resume,
    check_model,
    check_kernel_model,
    check_weights,
    check_model_section,
    check_adapter,
    check_prompts,
    check_validation,
    check_loss,
    check_teacher,
    check_pairs,
    check_agent_loop,
    check_branches,
    check_outside,
    check_environment,
    check_reward_keys,
    check_rewards,
    check_reward_model,
    check_latents,
    check_combination,
    check_group_rewards,
    check_reward_manager,
    check_reward_devices,
    check_timeshared,
    check_watching,
    check_continued,
)
"""All rules, in the order in which their messages are shown, after those of `values`."""


def check(config: DictConfig, rules: Sequence[Rule] = RULES) -> None:
    """Run `rules`, all by default.

    - Recipes that do not go together are reported alone: everything else follows from them.
    - A rule that reads a value of the wrong type or range is left out: the value's own message says what is wrong.

    Raises:
        ValueError: the messages of all rules that are broken, one line each.
    """
    check_recipes(config)
    values = value_problems(config)
    problems = [problem for problem in values.values() if problem is not None]
    usable = _without(config, list(values)) if values else config
    with read_only(usable):
        for rule in rules:
            try:
                rule(usable)
            except (MissingMandatoryValue, InterpolationToMissingValueError) as error:
                if not any(key in str(error) or error.full_key == key for key in values):
                    problems.append(_told(error))
            except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that leads nowhere
                problems.append(_told(error))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))


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
