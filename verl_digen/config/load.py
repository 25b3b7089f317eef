# SPDX-License-Identifier: Apache-2.0
"""From the composed config to `DigenConfig`: names and types by OmegaConf, values by the dataclasses."""

import math
from collections.abc import Iterator
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from verl_digen.config.digen import DigenConfig
from verl_digen.config.sampling import check_loss_section
from verl_digen.require import require, suggestion
from verl_digen.user_modules import KEY, import_user_modules

INFINITE = "digen.loss."
"""Beginning of keys that may be infinite, where the loss's own bound says so."""


@cache
def digen_schema() -> DictConfig:
    """`DigenConfig` as a config that can be merged into, which copies it: typed, and closed to unknown keys. Made once,
    because that takes 10 ms."""

    def open_for_values(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, False)  # frozen dataclasses make read-only nodes
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                open_for_values(child)

    schema = OmegaConf.structured(DigenConfig)
    open_for_values(schema)
    for node in (schema.loss, schema.environment.options):  # their settings are of a class chosen by name
        OmegaConf.set_struct(node, False)  # also under Hydra's closed config
    return schema


def digen_config(config: DictConfig) -> DigenConfig:
    """Validate the `digen:` section of verl's composed config, after importing the user's modules. ValueError for an
    unknown key, a value of the wrong type, a broken rule, or a module that cannot be imported."""
    import_user_modules(OmegaConf.select(config, KEY))
    section: Any = OmegaConf.select(config, "digen")
    require(
        section is not None,
        "a config for verl-digen needs a `digen:` section",
        None,
        "name one of its recipes, e.g. recipe=digen_flowgrpo",
    )
    try:
        # as plain data: a key added with `+` would pass in a section that is typed already
        merged = OmegaConf.merge(digen_schema(), OmegaConf.to_container(section, resolve=True))
        return _built(merged, list(_not_finite("digen", OmegaConf.to_container(merged))))
    except OmegaConfBaseException as error:
        raise ValueError(_named(error)) from error


def _built(merged: Any, problems: list[str]) -> DigenConfig:
    """Build the dataclasses. ValueError has all problems, old and new, at once, a paragraph each."""
    sections, values = {}, {}
    for name in merged:
        node = merged._get_node(name)
        if not isinstance(node, DictConfig):
            values[name] = node._value()
        elif not any(problem.startswith(f"digen.{name}.") for problem in problems):
            try:
                sections[name] = OmegaConf.to_object(node)
                if name == "loss":
                    check_loss_section(sections[name])
            except ValueError as error:
                problems.append(str(error))
    try:
        made = DigenConfig(**values, **({} if problems else sections))
    except ValueError as error:
        problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    return made


def _not_finite(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _not_finite(f"{key}.{name}", child)
    elif isinstance(value, float) and not math.isfinite(value) and (math.isnan(value) or not key.startswith(INFINITE)):
        yield f"{key} must be a finite number, got {value}; leave it out for the default"


def _named(error: Any) -> str:
    """Reword OmegaConf's message about a key: the key as typed, and a known one that is close."""
    hint = ""
    if isinstance(error, ConfigKeyError) and error.parent_node is not None:
        hint = suggestion(str(error.key), [str(name) for name in error.parent_node])
    said = (error.msg or str(error)).splitlines()[0]
    return f"digen.{error.full_key or ''}: {said}; {hint}the keys and their types are in verl_digen/config"
