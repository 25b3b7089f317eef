# SPDX-License-Identifier: Apache-2.0
"""Input of the rules: verl's composed config, its `digen:` section, parsed once, and the command line and the recipes
that it was composed of.

`recipe=` names one recipe of an algorithm or a model, then what changes how it runs. A recipe overrides those before
it. So the wrong order, or two models, silently composes into a mixture that was not asked for.
"""

import re
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from operator import attrgetter
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from verl.plugin import platform

from verl_digen.config import DigenConfig, digen_config
from verl_digen.recipe_source import AND
from verl_digen.require import as_typed, require, require_value

MACHINE = ("digen_cpu", "digen_machine")
"""Recipes of a machine: they may be combined with any other."""
GROUP_WORD = re.compile(r"\+*recipe=")
"""Start of the word of a command line that names recipes."""
PREFIX = "digen_"
"""Start of the names of our recipes that a run may begin with. Our others change the run of one that precedes them."""


@dataclass(frozen=True)
class StartConfig:
    """The config of a run that is about to start; rules call it `run`."""

    config: DictConfig
    prompts: dict[str, Any] = field(default_factory=dict)
    """train or val -> the `PromptSet` of its files, once `inputs.prompts_of` has read them."""

    @property
    def digen(self) -> DigenConfig:
        """The `digen:` section. ValueError if it cannot be parsed; the same for every rule, so it is shown once."""
        if isinstance(self._parsed, ValueError):
            raise self._parsed
        return self._parsed

    @cached_property
    def _parsed(self) -> DigenConfig | ValueError:
        try:
            return digen_config(self.config)
        except ValueError as error:
            return error

    @property
    def device(self) -> str:
        """Type of the platform's devices, such as cuda."""
        return platform.get_platform().device_name

    def value(self, key: str) -> Any:
        """The value of a key, or of a property of a section under `digen:`."""
        section, _, name = key.partition(".")
        if section == "digen":
            return attrgetter(name)(self.digen)
        return OmegaConf.select(self.config, key, throw_on_missing=True)

    def require_values(self, condition: str, *rows: tuple[str, Any, str, str]) -> None:
        """Require keys to have the one value that goes with a setting. ValueError for the first key that has another
        one. `condition`: the setting, such as "with KEY=VALUE"; `rows`: (key, value, reason, remedy), where a reason is
        what the message has after the condition."""
        for key, wanted, why, remedy in rows:
            require_value(key, self.value(key), wanted, f"{condition}{why}", remedy)

    def refuse_values(self, condition: str, *rows: tuple[str, Any, str, str]) -> None:
        """Refuse the one value that does not go with a setting, as `require_values` requires the one that does."""
        for key, refused, why, remedy in rows:
            rule = f"{key} must not be {as_typed(refused)} {condition}{why}"
            require(self.value(key) != refused, rule, self.value(key), remedy)


def command_line(config: DictConfig) -> list[str]:
    """The words after `python -m verl.trainer.main_ppo`; empty where the config has no record of them."""
    task = OmegaConf.select(config, "hydra.overrides.task")
    words: Any = [] if task is None else OmegaConf.to_container(task, resolve=False)  # they may hold interpolations
    return words


def typed_keys(config: DictConfig, section: str) -> set[str]:
    """Names of the keys of `section` that are set on the command line."""
    keys = [word.lstrip("+").partition("=")[0] for word in command_line(config) if not word.startswith("~")]
    return {key.removeprefix(f"{section}.") for key in keys if key.startswith(f"{section}.")}


def named_recipes(config: DictConfig) -> list[str]:
    """The recipes of a run, in order, as its command line or its YAML names them; empty where the config has no record
    of them. ValueError if the command line names others than those that Hydra took."""
    given = [word for word in command_line(config) if GROUP_WORD.match(word)]
    value = OverridesParser.create().parse_overrides([given[-1]])[0].value() if given else None
    typed = _names(value if isinstance(value, list) else [value])
    taken = _names([OmegaConf.select(config, "hydra.runtime.choices.recipe")])  # has no record of recipe=[A,B]
    require(
        not typed or not taken or typed == taken,
        "recipe must be given without + where a YAML names one",
        given[-1] if given else None,
        f"type recipe={AND.join(typed)}: it replaces {AND.join(taken)}",
    )
    return typed or taken


def _names(words: list[Any]) -> list[str]:
    return [name for word in words if word is not None for name in str(word).split(AND)]


def check_recipes(config: DictConfig) -> None:
    """Require one recipe of an algorithm or a model, in front, and none twice; says in which order to name them."""
    names = named_recipes(config)
    said = f"recipe={AND.join(names)}"
    engine, section = OmegaConf.select(config, "model_engine"), OmegaConf.select(config, "digen")
    remedy = "leave it out, or --config-name=ppo_megatron_trainer"
    require(engine in (None, "dp"), "model_engine must be dp: diffusion models train with FSDP2", engine, remedy)
    require(
        "digen" not in config or OmegaConf.is_dict(section),
        "digen must be a section with keys of its own",
        section,
        "leave it out, or set its keys, e.g. digen.seed=1",
    )
    require(
        OmegaConf.select(config, "digen.seed") is not None,
        "recipe must begin with the recipe of an algorithm or a model",
        said if names else None,
        f"add one in front, e.g. recipe={AND.join(['digen_flowgrpo', *names])}",
    )
    bases = [name for name in names if name.startswith(PREFIX) and name not in MACHINE]
    once = f"recipe={AND.join(dict.fromkeys(names))}"
    require(said == once, "recipe must name a recipe once", said, f"name {once}")
    require(
        len(bases) <= 1,
        "recipe must name one recipe of an algorithm or a model, because the last one would overwrite parts of the "
        "others",
        said,
        f"choose one of {', '.join(bases)}",
    )
    changes = {
        name
        for name in names
        if not name.startswith(PREFIX) and (files("verl_digen.recipes") / f"{name}.yaml").is_file()
    }
    ordered = f"recipe={AND.join(sorted(names, key=changes.__contains__))}"
    rule = "recipe must name what changes a run after the recipe that it changes"
    require(said == ordered, rule, said, f"name {ordered}")
