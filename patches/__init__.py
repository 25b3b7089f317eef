# SPDX-License-Identifier: Apache-2.0
"""Shims for upstream limitations: one module each, with its version range and its removal condition."""

from __future__ import annotations

import logging
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

logger = logging.getLogger(__name__)


def is_for(shim: str, package: str, versions: SpecifierSet) -> bool:
    """True if the installed version of `package` is in `versions`; else warns that `shim` is not applied."""
    installed = version(package)
    if versions.contains(installed):
        return True
    logger.warning(
        "%s was made for %s %s, and %s is installed; it is left out: look there whether it is still needed",
        shim,
        package,
        versions,
        installed,
    )
    return False
