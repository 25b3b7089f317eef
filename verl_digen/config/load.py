# SPDX-License-Identifier: Apache-2.0
"""From the composed config to `DigenConfig`: names and types by OmegaConf, values by the dataclasses."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from verl_digen.algorithms.objectives import objective_names
from verl_digen.config.digen import DigenConfig
from verl_digen.config.loss import check_loss_section
from verl_digen.require import as_typed, require, suggestion
from verl_digen.user_modules import KEY, import_user_modules

if TYPE_CHECKING:
    from omegaconf import DictConfig


MAY_BE_INFINITE = frozenset({"digen.loss.advantage_clip"})
"""Keys that may be infinite, which means: no bound."""


_resolved: dict[int, bytes | None] = {}
"""Identity of a config that does not change at present -> its section, once it was resolved."""


@cache
def _schema() -> DictConfig:
    """Make the schema, once, because that takes 10 ms; merging into it copies it."""
    return digen_schema()


def digen_schema() -> DictConfig:
    """`DigenConfig` as a config that can be merged into: typed, and closed to unknown keys."""
    from omegaconf import DictConfig, OmegaConf

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
    """Validate the `digen:` section of verl's composed config, after importing the user's modules.

    Raises:
        ValueError: an unknown key, a value of the wrong type, or a broken rule; or a module that cannot be imported.
    """
    from omegaconf import OmegaConf

    import_user_modules(OmegaConf.select(config, KEY))
    values = _resolved.get(id(config)) or _resolve(config)
    if id(config) in _resolved:
        _resolved[id(config)] = values
    found = _validated(values, tuple(objective_names()))
    if isinstance(found, ValueError):
        raise found.with_traceback(None)
    return found


def _resolve(config: DictConfig) -> bytes:
    """The section as pickled plain data."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section: Any = OmegaConf.select(config, "digen")
    require(
        section is not None,
        "a config for verl-digen needs a `digen:` section",
        None,
        "name one of its recipes, e.g. recipe=digen_flowgrpo",
    )
    try:
        # as plain data: a key added with `+` would pass in a section that is typed already
        return pickle.dumps(OmegaConf.to_container(section, resolve=True))
    except OmegaConfBaseException as error:
        raise ValueError(_named(error)) from error


@contextmanager
def unchanging(config: DictConfig) -> Iterator[None]:
    """Context in which `config` does not change: its section is resolved once, which takes 2 ms."""
    _resolved[id(config)] = None
    try:
        yield
    finally:
        del _resolved[id(config)]


def value_of(config: DictConfig, key: str) -> Any:
    """The value of a key, or of a property of a section under `digen:`."""
    from omegaconf import OmegaConf

    section, _, name = key.partition(".")
    if section == "digen":
        return attrgetter(name)(digen_config(config))
    return OmegaConf.select(config, key, throw_on_missing=True)


def require_values(config: DictConfig, condition: str, *rows: tuple[str, Any, str, str]) -> None:
    """Require keys to have the one value that goes with a setting.

    Args:
        condition: the setting, such as "with KEY=VALUE". rows: (key, value, reason, remedy); a reason is what the
            message has after the condition.

    Raises:
        ValueError: the first key that has another value.
    """
    for key, wanted, why, remedy in rows:
        given = value_of(config, key)
        require(given == wanted, f"{key} must be {as_typed(wanted)} {condition}{why}", given, remedy)


@lru_cache(maxsize=8)
def _validated(values: bytes, losses: tuple[str, ...]) -> DigenConfig | ValueError:
    """A pickled section, or the reason for refusing it. Cached: it takes 20 ms, and dozens of rules ask for it.

    Args:
        losses: those that are registered, which say what `digen.loss` may be.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        merged = OmegaConf.merge(_schema(), pickle.loads(values))
        return _built(merged, list(_not_finite("digen", OmegaConf.to_container(merged))))
    except OmegaConfBaseException as error:
        return ValueError(_named(error))
    except ValueError as error:
        return error


def _built(merged: Any, problems: list[str]) -> DigenConfig:
    """Build the dataclasses; all problems, old and new, are raised at once, one per section.

    Raises:
        ValueError: a paragraph per problem.
    """
    from omegaconf import DictConfig, OmegaConf

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
    elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key not in MAY_BE_INFINITE)):
        yield f"{key} must be a finite number, got {value}; leave it out for the default"


def _named(error: Any) -> str:
    """Reword OmegaConf's message about a key: the key as typed, and a known one that is close."""
    from omegaconf.errors import ConfigKeyError

    hint = ""
    if isinstance(error, ConfigKeyError) and error.parent_node is not None:
        hint = suggestion(str(error.key), [str(name) for name in error.parent_node])
    said = (error.msg or str(error)).splitlines()[0]
    return f"digen.{error.full_key or ''}: {said}; {hint}the keys and their types are in verl_digen/config"
