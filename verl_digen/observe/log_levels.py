# SPDX-License-Identifier: Apache-2.0
"""Import a library that sets the levels of everybody's logging, and have them back as they were."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_log_levels() -> Iterator[None]:
    """The root logger's level and its handlers' are after the block what they were before it.

    One of vLLM's requirements sets them all to ERROR when it is imported, and a run would go on without a word.
    """
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, handler_level in handlers:
            handler.setLevel(handler_level)
