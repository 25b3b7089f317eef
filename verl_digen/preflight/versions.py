# SPDX-License-Identifier: Apache-2.0
"""The installed versions: refused where they cannot work, a warning where they were not tested."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.metadata import version

from omegaconf import DictConfig

from verl_digen.versions import SUPPORTED, outside

logger = logging.getLogger(__name__)


def check_versions(config: DictConfig, found: Callable[[str], str] = version) -> None:
    """Require installed packages that can work; warn where they are not those that were tested."""
    installed = {name: found(name) for name in SUPPORTED}
    refused = list(outside(installed, tested=False))
    if refused:
        raise ValueError(
            "\n".join(
                f"{name} must be {wanted}, got {number}; verl-digen was tested with {SUPPORTED[name].tested}: "
                f"pip install '{name}{SUPPORTED[name].tested}'"
                for name, number, wanted in refused
            )
        )
    for name, number, wanted in outside(installed, tested=True):
        logger.warning(
            "%s %s was not tested with this version of verl-digen, %s was; private names of it are used, so numbers "
            "may differ without an error: run the contract tests (tests/contracts)",
            name,
            number,
            wanted,
        )
