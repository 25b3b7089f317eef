# SPDX-License-Identifier: Apache-2.0
"""Keys under `digen:` that the run they are set for does not read."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omegaconf import DictConfig

from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.pools import COLOCATED

DEFAULTS = DigenConfig()


def effect_problems(config: DictConfig) -> list[str]:
    """A paragraph for each key that has another value than its default, and that this run does not read."""
    digen, mode = digen_config(config), config.trainer.v1.trainer_mode
    separate = "where trainer and replicas take turns on the same devices", "use recipe=...+disaggregated"
    problems = []
    if mode == COLOCATED:
        problems += _changed("gap", digen.gap, DEFAULTS.gap, *separate)
        problems += _changed("queue", digen.queue, DEFAULTS.queue, *separate)
    if digen.staleness.max_versions == 0:
        fresh = "with digen.staleness.max_versions=0", "set digen.staleness.max_versions=1"
        problems += _changed("staleness", digen.staleness, DEFAULTS.staleness, *fresh)
    if digen.tag.policy == "off":
        problems += _changed("tag", digen.tag, DEFAULTS.tag, "with digen.tag.policy=off", "set digen.tag.policy=bts")
    if not digen.environment.is_on:
        alone = "without an environment", "name one, digen.environment.name or digen.environment.path"
        problems += _changed("environment", digen.environment, DEFAULTS.environment, *alone)
    return problems


def _changed(name: str, section: Any, default: Any, why: str, remedy: str) -> list[str]:
    problems = []
    for field in fields(section):
        given, expected = getattr(section, field.name), getattr(default, field.name)
        if given != expected:
            typed = "null" if expected is None else str(expected).lower()
            problems.append(
                f"digen.{name}.{field.name} must be {typed} {why}, because it has no effect there, got {given!r}; "
                f"{remedy}"
            )
    return problems
