# SPDX-License-Identifier: Apache-2.0
"""Let an override that gives all of `digen.reward.functions`, or all of an entry, replace the mapping.

Limitation:  Hydra merges a mapping from the command line into the existing one, and has no override that
             replaces; `KEY={}` changes nothing.
Effect:      without this, a run with its own rewards trains on the recipe's rewards, too.
Affects:     hydra-core ==1.3.*
Remove when: Hydra has an override that replaces a mapping, or no longer merges a mapping given as a whole;
             tests/plugin/test_rewards_given.py::test_hydra_by_itself_merges_a_mapping fails then.

`+KEY={...}`, `KEY.name=value` and `KEY.name.part=value` still add to the mapping, or change one value of it. An entry
that is a number, its weight, becomes a mapping when a part of it is given. Recipe files are merged as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict
from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet("==1.3.*")
KEYS = ("digen.reward.functions",)
"""Mappings that an override replaces, and so it does their entries."""
WEIGHT = "weight"
"""Part that an entry stands for if it is a number."""

merge_overrides: Callable[[Sequence[Override], DictConfig], None] = ConfigLoaderImpl._apply_overrides_to_config
"""Hydra's function at the import of this module."""


def apply() -> None:
    """Replace Hydra's function with `replace_overrides`."""
    if is_for(__name__, "hydra-core", VERSIONS):
        ConfigLoaderImpl._apply_overrides_to_config = staticmethod(replace_overrides)  # type: ignore[method-assign]


def replace_overrides(overrides: Sequence[Override], cfg: DictConfig) -> None:
    """Apply the overrides in order; one that gives all of a mapping in `KEYS` empties the mapping first."""
    for override in overrides:
        if _gives_whole(override):
            _empty(OmegaConf.select(cfg, override.key_or_group))
        _open_entry(override.key_or_group, cfg)
        merge_overrides([override], cfg)


def _gives_whole(override: Override) -> bool:
    is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    is_mapping = override.key_or_group in KEYS or override.key_or_group.rpartition(".")[0] in KEYS
    return is_plain and is_mapping and isinstance(override.value(), dict)


def _open_entry(key: str, cfg: DictConfig) -> None:
    """Make a mapping of the entry that `key` names a part of, if it is a number."""
    entry = key.rpartition(".")[0]
    mapping = OmegaConf.select(cfg, entry.rpartition(".")[0]) if entry.rpartition(".")[0] in KEYS else None
    name = entry.rpartition(".")[2]
    if isinstance(mapping, DictConfig) and isinstance(mapping.get(name), int | float):
        mapping[name] = {WEIGHT: mapping[name]}


def _empty(mapping: Any) -> None:
    if isinstance(mapping, DictConfig):
        with open_dict(mapping):
            mapping.clear()
