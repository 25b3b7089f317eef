# SPDX-License-Identifier: Apache-2.0
"""Keys under `digen:` that another setting turns off: a run that does not read them refuses other values than their
defaults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from verl_digen.config import DigenConfig
from verl_digen.preflight.pools import COLOCATED, TURNS
from verl_digen.preflight.recipes import typed_keys
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import as_typed

DEFAULTS = DigenConfig()


@dataclass(frozen=True)
class Switch:
    """Condition under which the keys of a section are read."""

    keys: str
    """`SECTION.START`: the keys of the section whose names begin so; `SECTION.`: all."""
    condition: str
    """`KEY=VALUE`: they are read with this value alone. `KEY!=VALUE`: with any other."""
    remedy: str
    words: str = ""
    """The condition that turns them off, where it needs more words than `with KEY=VALUE`, or others."""
    own: str = ""
    """The section's own key that is the switch; where it is typed, keys of a recipe may stay."""

    def is_on(self, run: StartConfig) -> bool:
        """True if the run reads the keys."""
        key, _, wanted = self.condition.replace("!=", "=").partition("=")
        return (as_typed(run.value(key)) == wanted) != ("!=" in self.condition)

    @property
    def off(self) -> str:
        """The condition that turns them off, in words."""
        word = "with" if "!=" in self.condition else "without"
        return self.words or f"{word} {self.condition.replace('!=', '=')}"


CONSECUTIVE = ("size", "range", "shift_")
ROLLOUT_NAME = "actor_rollout_ref.rollout.name"
SWITCHES = (
    Switch("gap.", f"trainer.v1.trainer_mode!={COLOCATED}", "use recipe=...+disaggregated", TURNS),
    Switch("queue.", f"trainer.v1.trainer_mode!={COLOCATED}", "use recipe=...+disaggregated", TURNS),
    Switch("staleness.", "digen.staleness.max_versions!=0", "set digen.staleness.max_versions=1"),
    Switch("tag.", "digen.tag.policy!=off", "set digen.tag.policy=bts"),
    Switch(
        *("environment.", "digen.environment.target!=null", "name one, digen.environment.name or .path"),
        "without an environment",
    ),
    Switch("ema.", "digen.ema.enable!=false", "set digen.ema.enable=true", own="enable"),
    Switch("kl.", "digen.kl.coef!=0.0", "set digen.kl.coef", own="coef"),
    Switch("sampling.sa_", "digen.sampling.solver=sa", "choose that solver", own="solver"),
    *(Switch(f"window.{name}", "digen.window.kind=consecutive", "set it", own="kind") for name in CONSECUTIVE),
    Switch("window.fraction", "digen.window.kind=fraction", "set it", own="kind"),
    Switch("branches.", "digen.branches.splits!=[]", "set them", own="splits"),
    Switch("rollout.encoders", f"{ROLLOUT_NAME}!=vllm_omni", f"use {ROLLOUT_NAME}=diffusers"),
    *(
        Switch(
            *(f"rollout.{name}", f"{ROLLOUT_NAME}!=trainer", f"set digen.{name}, or {ROLLOUT_NAME}=diffusers"),
            f"with {ROLLOUT_NAME}=trainer, whose network is the trainer's",
        )
        for name in ("attention_backend", "compile")
    ),
    Switch("rollout.conditions_", "digen.rollout.encoders=before", "set that"),
    Switch("reward.custom_", "reward.custom_reward_function.path!=null", "name it"),
)


def effect_problems(run: StartConfig) -> list[str]:
    """A paragraph for each key that has another value than its default, and that this run does not read."""
    digen = run.digen
    return [problem for switch in SWITCHES if not switch.is_on(run) for problem in _changed(switch, run, digen)]


def _changed(switch: Switch, run: StartConfig, digen: DigenConfig) -> Iterator[str]:
    name_of_section, _, start = switch.keys.partition(".")
    typed = typed_keys(run.config, f"digen.{name_of_section}")
    section, default = (getattr(each, name_of_section) for each in (digen, DEFAULTS))
    for name in (field.name for field in fields(section) if field.name.startswith(start)):
        given, expected = getattr(section, name), getattr(default, name)
        if given != expected and (name in typed or switch.own not in typed):
            yield (
                f"digen.{name_of_section}.{name} must be {as_typed(expected)} {switch.off}, because it has no effect "
                f"there, got {given!r}; {switch.remedy}"
            )
