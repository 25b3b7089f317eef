# SPDX-License-Identifier: Apache-2.0
"""Let Hydra suggest the key that was probably meant, and list all overrides that cannot be applied.

Limitation:  Hydra stops at the first override that it cannot apply, says only that the key does not exist, and
             advises to append it, which adds a key that no code reads. A config group without a name ends in
             a traceback.
Effect:      without this, `trainer.total_step=3` is answered with "use +trainer.total_step=3".
Affects:     hydra-core ==1.3.*
Remove when: Hydra suggests keys itself; tests/plugin/test_override_errors.py::
             test_hydra_by_itself_suggests_no_key fails then.

Changes only error messages, and only for verl's configs; valid overrides are applied as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from difflib import get_close_matches
from itertools import groupby
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError
from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet("==1.3.*")
SECTION = "digen"
GROUP = "recipe"
VERLS_SECTION = "actor_rollout_ref"
"""Section that identifies a verl config."""

Apply = Callable[[list[Override], DictConfig], None]


def apply() -> None:
    """Wrap Hydra's current functions in `explaining` and `told`."""
    if is_for(__name__, "hydra-core", VERSIONS):
        hydras = ConfigLoaderImpl._apply_overrides_to_config
        ConfigLoaderImpl._apply_overrides_to_config = staticmethod(explaining(hydras))  # type: ignore[method-assign]
        ConfigLoaderImpl.load_configuration = told(ConfigLoaderImpl.load_configuration)  # type: ignore[method-assign]


def explaining(hydras: Apply) -> Apply:
    """`hydras`, but raising one error for all overrides that it cannot apply to a verl config."""

    def apply_all(overrides: Sequence[Override], cfg: DictConfig) -> None:
        if VERLS_SECTION not in cfg:
            hydras(list(overrides), cfg)
            return
        problems = []
        for override in overrides:
            try:
                hydras([override], cfg)
            except ConfigCompositionException as error:
                problems.append(_explain(override, cfg, error))
        if problems:
            raise ConfigCompositionException("\n".join(problems))

    return apply_all


def told(load: Callable[..., DictConfig]) -> Callable[..., DictConfig]:
    """`load`, but turning a ValueError about the command line into the error that Hydra shows without a traceback."""

    @functools.wraps(load)
    def load_or_tell(*args: Any, **kwargs: Any) -> DictConfig:
        try:
            return load(*args, **kwargs)
        except OverrideParseException as error:
            raise ConfigCompositionException(
                f"{error.override!r} must be KEY=VALUE in Hydra's grammar: {str(error).splitlines()[0]}; write keys in "
                "ASCII letters, and put a text with other characters into quotes inside the shell's: \"key='text'\""
            ) from error
        except ValueError as error:
            raise ConfigCompositionException(f"{error}; a config group is given a name, or a list of names") from error

    return load_or_tell


def _explain(override: Override, cfg: DictConfig, error: ConfigCompositionException) -> str:
    key, typed = override.key_or_group, override.input_line
    if key.startswith(f"{SECTION}.") and SECTION not in cfg:
        return f"{key} needs a recipe of verl-digen, got {typed!r}; add e.g. recipe=digen_flowgrpo"
    if key == GROUP:
        return (
            f"recipe must be a name or a list of names, got {typed!r}; give e.g. recipe=[digen_flowgrpo,disaggregated]"
        )
    if override.is_delete() and override.value() is None and closest_keys(key, cfg)[:1] == [key]:
        return f"{key} must have a value to be deleted, got {typed!r} for one that is null; leave the word out"
    if isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError):
        close = closest_keys(key, cfg)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        return f"{key} must be a key of the config, got {typed!r}; {meant}--cfg job shows all keys"
    if error.__cause__ is not None:
        return f"{key} must have a value of its type, got {typed!r}; {str(error.__cause__).splitlines()[0]}"
    return f"{key} must be overridden as Hydra does, got {typed!r}; {' '.join(str(error).split())}"


def closest_keys(key: str, cfg: DictConfig, unknown: Collection[str] = ()) -> list[str]:
    """Known keys that `key` may have meant, the closest first; at most two. `unknown`: keys of `cfg` to leave out,
    with their subtrees.

    Example:
        closest_keys("trainer.total_step", cfg)  # ["trainer.total_training_steps"]
        closest_keys("digen.digen.seed", cfg)    # ["digen.seed"]
    """
    known = [one for one in _keys(cfg, "") if one.partition(".")[0] not in NEVER_MEANT]
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


MANY = 5
"""Maximum number of sections that share a key name for the name to be a useful hint."""
NEVER_MEANT = frozenset({"hydra", "critic", "distillation"})
"""Sections that a diffusion run does not read."""


def _keys(node: DictConfig, prefix: str) -> Iterator[str]:
    for name in node:
        key = f"{prefix}{name}"
        yield key
        child = node._get_node(name)
        if isinstance(child, DictConfig) and not _is_opaque(child):
            yield from _keys(child, f"{key}.")


def _is_opaque(node: DictConfig) -> bool:
    return node._is_none() or node._is_missing() or node._is_interpolation()
