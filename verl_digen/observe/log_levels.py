# SPDX-License-Identifier: Apache-2.0
"""Import a library that changes log levels globally, and restore them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_log_levels() -> Iterator[None]:
    """Restore the levels of the root logger and its handlers after the block.

    One of vLLM's requirements sets them all to ERROR when it is imported, which would silence a run.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, handler_level in handlers:
            handler.setLevel(handler_level)
