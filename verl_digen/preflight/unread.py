# SPDX-License-Identifier: Apache-2.0
"""Keys that nothing reads: keys under `digen:` that another setting turns off (`SWITCHES`), and unknown keys, added on
the command line with `+` or in a user's recipe.

Hydra refuses an unknown key unless it is added. A section's keys are the fields of its dataclass (`_target_`), which
verl makes of it in the workers, and keys of verl's own yaml. Not checked, because their keys are the user's:

- mappings inside a dataclass's section (`engine_kwargs`, `override_optimizer_config`, `mixed_precision`, `wrap_policy`,
  `profiler.tool_config`, `custom`), and sections that are empty in verl's yaml (`mm_processor_kwargs`);
- `OPEN`: sections that are passed on as a whole, or have a rule of their own;
- a section that a user's class reads (`READERS`);
- a user's own section, `+mine.key=value`, unless its name is nearly one of verl's.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, reduce
from importlib.resources import files
from itertools import groupby
from typing import Any, TypeGuard

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.types import RunMode
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from verl_digen.algorithms.objectives import default_config, objective_names
from verl_digen.config import DigenConfig
from verl_digen.preflight.pools import COLOCATED, TURNS
from verl_digen.preflight.start_config import StartConfig, typed_keys
from verl_digen.require import as_typed

VERLS_YAML = "_generated_ppo_trainer.yaml"
"""verl's composed config, which it ships in addition to the parts."""
OPEN = frozenset(
    {
        *("hydra", "digen", "ray_kwargs", "global_profiler", "transfer_queue.backend", "actor_rollout_ref.model"),
        *("critic", "distillation", "custom_reward_function", "reward_model", "sandbox_fusion", "skip"),
    }
)
EMPTY = frozenset({"trainer.v1.sync", "trainer.v1.sampler.sampler_kwargs"})
"""Sections that are empty in verl's yaml, and not the user's: they belong to another trainer or sampler of verl."""
EXTRA: Mapping[str, frozenset[str]] = {
    "data.custom_cls": frozenset({"checkpoint"}),
    "reward.custom_reward_function": frozenset({"reward_kwargs"}),
}
"""Section -> keys that are read, and not in verl's yaml."""
OUR_SAMPLER = ("trainer.v1.sampler.custom_sampler.name", "GroupReplayBuffer")
READERS: Mapping[str, tuple[str, str]] = {
    "data": ("data.custom_cls.name", "DiffusionPromptDataset"),
    "reward": ("reward.reward_manager.name", "DiffusionRewardManager"),
    **dict.fromkeys(("trainer.v1.sampler", "trainer.v1.sampler.sampler_kwargs"), OUR_SAMPLER),
}
"""Section -> key with the name of the class that reads it, and our class."""
MANY = 5
"""Maximum number of sections that share a key name for the name to be a useful hint."""
NEVER_MEANT = frozenset({"hydra", "critic", "distillation"})
"""Sections that a diffusion run does not read."""


def unknown_problems(run: StartConfig) -> list[str]:
    """A paragraph for each key that nothing reads."""
    found = list(_unknown(run.config, "", _verls_keys())) and list(_unknown(run.config, "", _composed_keys()))
    more = _loss_keys(run.config) if found else []
    problems = []
    for key, value, beside in found:
        section, _, name = key.rpartition(".")
        close = [f"{section}.{one}".lstrip(".") for one in get_close_matches(name, beside - {"_target_"}, n=1)]
        close = close or closest_keys(key, run.config, [one for one, _, _ in found], more)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        shown = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        problems.append(
            f"{key} must be a key that is read, got {shown!r}; {meant}leave it out, or put a key of your own into a "
            f"section of your own, e.g. +mine.{name}=..."
        )
    return problems


def _loss_keys(config: DictConfig) -> list[str]:
    """Keys of the chosen loss, which the config holds only where they are not the defaults."""
    name = OmegaConf.select(config, "digen.loss.name")
    return [f"digen.loss.{key}" for key in asdict(default_config(name))] if name in objective_names() else []


def _unknown(section: DictConfig, path: str, verls: Any) -> Iterator[tuple[str, Any, set[str]]]:
    """(key, value, known keys of the same section)."""
    known = _known(section, path, verls)
    for name in section:
        key = f"{path}.{name}" if path else str(name)
        child: Any = section._get_node(name)
        if key in OPEN:
            continue
        if known is not None and name not in known and (path or _is_slip(str(name), child, section, known)):
            yield key, child if OmegaConf.is_config(child) else child._value(), known
        elif _is_section(child):
            yield from _unknown(child, key, verls.get(name) if isinstance(verls, dict) else None)


def _known(section: DictConfig, path: str, verls: Any) -> set[str] | None:
    """The section's keys; None where they are the user's."""
    if path in READERS and OmegaConf.select(section._get_root(), READERS[path][0]) != READERS[path][1]:
        return None
    names = set(verls or ()) | EXTRA.get(path, frozenset()) | {"_target_"}
    target = section._get_node("_target_", validate_access=False)
    if target is not None:
        own = _fields(str(target._value()))
        return None if own is None else names | own
    parent: Any = section._get_parent()
    of_dataclass = parent is not None and "_target_" in parent and path not in EXTRA
    return names if not of_dataclass and (verls or path in EMPTY) else None


def _fields(target: str) -> set[str] | None:
    """The fields of a dataclass; None where the name is of something else, which verl reports itself."""
    try:
        found = get_object(target)
    except Exception:  # any exception of the user's module at import
        return None
    return {field.name for field in fields(found)} if is_dataclass(found) else None


def _is_slip(name: str, child: Any, root: DictConfig, known: set[str]) -> bool:
    """True if a new top-level name is nearly one that is known, or a value with the name of a key somewhere below."""
    if get_close_matches(name, known, n=1, cutoff=0.8):
        return True
    return not isinstance(child, DictConfig) and any(
        one.rpartition(".")[2] == name for one in closest_keys(name, root, [name])
    )


def closest_keys(key: str, cfg: DictConfig, unknown: Collection[str] = (), more: Collection[str] = ()) -> list[str]:
    """Known keys that `key` may have meant, the closest first; at most two. `unknown`: keys of `cfg` to leave out, with
    their subtrees.

    Example:
        closest_keys("digen.digen.seed", cfg)    # ["digen.seed"]
    """
    known = [one for one in dict.fromkeys((*keys_of(cfg), *more)) if one.partition(".")[0] not in NEVER_MEANT]
    known = [one for one in known if not any(f"{one}.".startswith(f"{other}.") for other in unknown)]
    section, _, name = key.rpartition(".")
    beside = {one.rpartition(".")[2]: one for one in known if one.rpartition(".")[0] == section}
    named = [one for one in known if one.rpartition(".")[2] == name]
    once = ".".join(part for part, _ in groupby(key.split(".")))  # a section typed twice
    found = [once] if once != key and once in known else []
    found += [beside[one] for one in get_close_matches(name, beside, n=2)]
    found += get_close_matches(key, named, n=1, cutoff=0.0) if len(named) <= MANY else []
    found += get_close_matches(key, known, n=2, cutoff=0.8)
    return list(dict.fromkeys(found))[:2]


def keys_of(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """The dotted keys of a config, sections included."""
    for name in node:
        key = f"{prefix}{name}"
        yield key
        child = node._get_node(name)
        if _is_section(child):
            yield from keys_of(child, f"{key}.")


def _is_section(node: Any) -> TypeGuard[DictConfig]:
    return isinstance(node, DictConfig) and isinstance(node._value(), dict)  # not null, missing or an interpolation


def verls_default(key: str) -> Any:
    """The value of a key in verl's own yaml."""
    return reduce(lambda node, name: node[name], key.split("."), _verls_keys())


@cache
def _verls_keys() -> Any:
    text = files("verl.trainer.config").joinpath(VERLS_YAML).read_text(encoding="utf-8")
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) | {"model_engine": None}


@cache
def _composed_keys() -> Any:
    """Keys that Hydra composes of the parts, which takes longer: a fork of verl may have some that its file lacks."""
    loader = ConfigLoaderImpl(create_config_search_path("pkg://verl.trainer.config"))  # a run has Hydra's public one
    return OmegaConf.to_container(loader.load_configuration("ppo_trainer", [], RunMode.RUN))


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


CONSECUTIVE, SET_KIND = ("size", "range", "shift_"), "type digen.window.kind: consecutive, or the one meant"
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
    *(Switch(f"window.{name}", "digen.window.kind=consecutive", SET_KIND, own="kind") for name in CONSECUTIVE),
    Switch("window.fraction", "digen.window.kind=fraction", SET_KIND, own="kind"),
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
    return [problem for switch in SWITCHES if not switch.is_on(run) for problem in _changed(switch, run)]


def _changed(switch: Switch, run: StartConfig) -> Iterator[str]:
    name_of_section, _, start = switch.keys.partition(".")
    typed = typed_keys(run.config, f"digen.{name_of_section}")
    section, default = (getattr(each, name_of_section) for each in (run.digen, DEFAULTS))
    for name in (field.name for field in fields(section) if field.name.startswith(start)):
        given, expected = getattr(section, name), getattr(default, name)
        if given != expected and (name in typed or switch.own not in typed):
            yield (
                f"digen.{name_of_section}.{name} must be {as_typed(expected)} {switch.off}, because it has no effect "
                f"there, got {given!r}; {switch.remedy}"
            )
