# SPDX-License-Identifier: Apache-2.0
"""All rules, and how they are run."""

from __future__ import annotations

from collections.abc import Callable

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from verl_digen.preflight.inputs import check_loss, check_model, check_prompts, check_rewards
from verl_digen.preflight.pools import check_device, check_placement, check_pools, check_rollout, check_virtual
from verl_digen.preflight.verl_keys import check_batches, check_digen, check_plugin, check_strategy, check_unused

RULES: tuple[Callable[[DictConfig], None], ...] = (
    check_plugin,
    check_digen,
    check_device,
    check_unused,
    check_strategy,
    check_batches,
    check_rollout,
    check_pools,
    check_virtual,
    check_placement,
    check_model,
    check_prompts,
    check_loss,
    check_rewards,
)
"""In the order in which their messages are shown."""


def check(config: DictConfig) -> None:
    """Run all rules.

    Raises:
        ValueError: the messages of all rules that are broken, one line each.
    """
    problems = []
    for rule in RULES:
        try:
            rule(config)
        except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that leads nowhere
            problems.append(f"{error.full_key or rule.__name__}: {str(error).splitlines()[0]}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))
