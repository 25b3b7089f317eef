# SPDX-License-Identifier: Apache-2.0
"""Cache of scores by content: the same picture with the same prompt is not asked for twice. Bound: `size` entries."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Part = str | bytes | NDArray[Any]


def content_key(*parts: Part) -> bytes:
    """SHA-256 of the parts, in order. Parts that differ in kind, shape, dtype or division have different keys."""
    digest = hashlib.sha256()
    for part in parts:
        if isinstance(part, np.ndarray):
            kind, data = f"array {part.dtype.str} {part.shape}", np.ascontiguousarray(part).tobytes()
        else:
            kind, data = type(part).__name__, part.encode() if isinstance(part, str) else part
        digest.update(f"{kind} {len(data)}\n".encode())
        digest.update(data)
    return digest.digest()


class AnswerCache:
    """Least recently used entries go first.

    Args:
        size: maximum entries; 0 keeps none.
    """

    def __init__(self, size: int):
        from cachetools import LRUCache  # comes with verl; here so that checks of the config do without it

        self._entries: Any = LRUCache(size)
        self.num_hits = 0

    def find(self, key: bytes) -> Any:
        """The entry, or None."""
        found = self._entries.get(key)
        self.num_hits += found is not None
        return found

    def put(self, key: bytes, entry: Any) -> None:
        """Keep an entry, which is not None."""
        if self._entries.maxsize:
            self._entries[key] = entry
