# SPDX-License-Identifier: Apache-2.0
"""The checks of a start that apply to a plan, too: values, and batches that divide."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.preflight.unknown import unknown_problems
from verl_digen.preflight.values import value_problems
from verl_digen.preflight.verl_keys import check_batches


def check_plannable(config: DictConfig) -> None:
    """Raise ValueError for a config that a run would refuse on any machine and with any files."""
    problems = [problem for problem in value_problems(config).values() if problem is not None]
    problems += unknown_problems(config)
    if problems:
        raise ValueError("\n".join(problems))
    check_batches(config)
