# SPDX-License-Identifier: Apache-2.0
"""Protocols of reward servers, one file each: `protocol: NAME` is the file NAME.py, which defines `PROTOCOL`."""

import pkgutil
from typing import Any

from verl_digen.require import check_class, require_one_of
from verl_digen.reward.servers.protocol import Protocol
from verl_digen.user_modules import FILE_END, load

PROTOCOLS = tuple(module.name for module in pkgutil.iter_modules(__path__))
"""Names of the files."""


def find(name: Any, key: str = "protocol") -> type[Protocol]:
    """The class of a protocol: a file's here, or your own FILE.py:NAME. ValueError if it is none."""
    own = str(name)
    if FILE_END not in own:
        require_one_of(key, name, (*PROTOCOLS, "FILE.py:NAME"))
        own = f"{__name__}.{name}:PROTOCOL"
    return check_class(load(own, key, "FILE.py:NAME"), Protocol, key)
