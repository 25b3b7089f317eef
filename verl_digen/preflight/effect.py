# SPDX-License-Identifier: Apache-2.0
"""Keys under `digen:` that the run they are set for does not read: one switch per section, and what it switches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig

from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.pools import COLOCATED
from verl_digen.preflight.recipes import typed_keys
from verl_digen.reward.named import has_custom

DEFAULTS = DigenConfig()


@dataclass(frozen=True)
class Switch:
    """Condition under which the keys of a section are read."""

    section: str
    is_on: Callable[[DictConfig, DigenConfig], bool]
    why: str
    remedy: str
    key: str = ""
    """The section's own key that is the switch; where it is typed, keys of a recipe may stay."""
    prefix: str = ""
    """Start of the names of the keys that it switches; "": all."""


def _separate(config: DictConfig, digen: DigenConfig) -> bool:
    return config.trainer.v1.trainer_mode != COLOCATED


TAKE_TURNS = "where trainer and replicas take turns on the same devices", "use recipe=...+disaggregated"
SWITCHES = (
    Switch("gap", _separate, *TAKE_TURNS),
    Switch("queue", _separate, *TAKE_TURNS),
    Switch(
        "staleness",
        lambda config, digen: digen.staleness.max_versions > 0,
        "with digen.staleness.max_versions=0",
        "set digen.staleness.max_versions=1",
    ),
    Switch(
        "tag",
        lambda config, digen: digen.tag.policy != "off",
        "with digen.tag.policy=off",
        "set digen.tag.policy=bts",
    ),
    Switch(
        "environment",
        lambda config, digen: digen.environment.is_on,
        "without an environment",
        "name one, digen.environment.name or digen.environment.path",
    ),
    Switch(
        "ema",
        lambda config, digen: digen.ema.enable,
        "with digen.ema.enable=false",
        "set digen.ema.enable=true",
        key="enable",
    ),
    Switch("kl", lambda config, digen: digen.kl.coef > 0, "with digen.kl.coef=0", "set digen.kl.coef", key="coef"),
    Switch(
        "sampling",
        lambda config, digen: digen.sampling.solver == "sa",
        "without digen.sampling.solver=sa",
        "choose that solver",
        key="solver",
        prefix="sa_",
    ),
    Switch(
        "rollout",
        lambda config, digen: config.actor_rollout_ref.rollout.name == "diffusers",
        "with replicas that vLLM-Omni runs",
        "use actor_rollout_ref.rollout.name=diffusers",
        prefix="encoders",
    ),
    Switch(
        "rollout",
        lambda config, digen: digen.rollout.encoders == "before",
        "without digen.rollout.encoders=before",
        "set that",
        prefix="conditions_",
    ),
    Switch(
        "reward",
        lambda config, digen: has_custom(config),
        "without a reward function of your own",
        "name it, reward.custom_reward_function.path",
        prefix="custom_",
    ),
)


def effect_problems(config: DictConfig) -> list[str]:
    """A paragraph for each key that has another value than its default, and that this run does not read."""
    digen = digen_config(config)
    return [
        problem
        for switch in SWITCHES
        if not switch.is_on(config, digen)
        for problem in _changed(switch, digen, typed_keys(config, f"digen.{switch.section}"))
    ]


def _changed(switch: Switch, digen: DigenConfig, typed: set[str]) -> Iterator[str]:
    section, default = (getattr(each, switch.section) for each in (digen, DEFAULTS))
    names: list[Any] = [field.name for field in fields(section) if field.name.startswith(switch.prefix)]
    for name in names:
        given, expected = getattr(section, name), getattr(default, name)
        if given != expected and (name in typed or switch.key not in typed):
            value = "null" if expected is None else str(expected).lower()
            yield (
                f"digen.{switch.section}.{name} must be {value} {switch.why}, because it has no effect there, got "
                f"{given!r}; {switch.remedy}"
            )
