# SPDX-License-Identifier: Apache-2.0
"""Let an override that gives `digen.reward.functions` as a whole replace it.

Limitation:  Hydra merges a mapping given on the command line into the one that is there, and has no override that
             replaces; `KEY={}` changes nothing.
Effect:      without this, a run with rewards of one's own trains on the recipe's rewards, too.
Affects:     hydra-core ==1.3.*
Remove when: Hydra has an override that replaces a mapping, or merges no mapping given as a whole;
             tests/plugin/test_rewards_given.py::test_hydra_by_itself_merges_a_mapping fails then.

`+KEY={...}` still adds to the mapping, as does `KEY.name=value`. Mappings in recipe files are merged as ever.
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
"""Mappings that are replaced."""

merge_overrides: Callable[[Sequence[Override], DictConfig], None] = ConfigLoaderImpl._apply_overrides_to_config
"""Hydra's own, as it was when this module was imported."""


def apply() -> None:
    """Put `replace_overrides` in the place of Hydra's own."""
    if is_for(__name__, "hydra-core", VERSIONS):
        ConfigLoaderImpl._apply_overrides_to_config = staticmethod(replace_overrides)  # type: ignore[method-assign]


def replace_overrides(overrides: Sequence[Override], cfg: DictConfig) -> None:
    """Apply the overrides in their order; one that gives a mapping of `KEYS` as a whole empties it first."""
    for override in overrides:
        if _gives_whole(override):
            _empty(OmegaConf.select(cfg, override.key_or_group))
        merge_overrides([override], cfg)


def _gives_whole(override: Override) -> bool:
    is_plain = not (override.is_add() or override.is_force_add() or override.is_delete())
    return is_plain and override.key_or_group in KEYS and isinstance(override.value(), dict)


def _empty(mapping: Any) -> None:
    if isinstance(mapping, DictConfig):
        with open_dict(mapping):
            mapping.clear()
