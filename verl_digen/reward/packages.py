# SPDX-License-Identifier: Apache-2.0
"""Packages that a reward needs, imported when it is made."""

from __future__ import annotations

import importlib
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
        raise ValueError(
            f"reward {needed_by} needs the package {module.partition('.')[0]}, which {state}; pip install '{install}'"
        ) from error
