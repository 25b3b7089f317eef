# SPDX-License-Identifier: Apache-2.0
"""Packages that a reward needs: looked for before a run starts, imported when the reward is made."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

EXTRA = "verl-digen[rewards]"


def imported(module: str, needed_by: str, install: str = EXTRA) -> ModuleType:
    """Import an optional package.

    Args:
        needed_by: name of the reward, for the message.
        install: what to hand to pip where the package is not installed.

    Raises:
        ValueError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        state = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ValueError(_told(module, needed_by, state, install)) from error


def require_installed(modules: Iterable[str], needed_by: str) -> None:
    """Raise ValueError unless the packages are installed; imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ValueError(_told(module, needed_by, "is not installed", EXTRA))


def _told(module: str, needed_by: str, state: str, install: str) -> str:
    return f"reward {needed_by} needs the package {module.partition('.')[0]}, which {state}; pip install '{install}'"
