# SPDX-License-Identifier: Apache-2.0
"""Protocols of reward servers, one file each: `protocol: NAME` is the file NAME.py, which defines `PROTOCOL`."""

import importlib
import pkgutil
from typing import Any

from verl_digen.require import require_one_of
from verl_digen.reward.servers.protocol import Protocol

PROTOCOLS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""Names of the files."""


def find(name: Any, key: str = "protocol") -> type[Protocol]:
    """The class of a protocol. ValueError if there is no such file."""
    require_one_of(key, name, PROTOCOLS)
    return importlib.import_module(f"{__name__}.{name}").PROTOCOL
