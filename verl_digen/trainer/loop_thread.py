# SPDX-License-Identifier: Apache-2.0
"""An event loop in a thread of its own: what it waits for goes on while the caller does something else.

verl's loop is synchronous: between two steps the driver saves, validates and moves weights. Replicas that may begin the
next batch meanwhile are fed from here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class LoopThread:
    """Example:

    loop = LoopThread("conductor")
    loop.run(conductor.run_batch())     # blocks the caller; what the coroutine started goes on afterwards
    """

    def __init__(self, name: str):
        self._loop = asyncio.new_event_loop()
        # a daemon: a run that stops does not wait for replicas
        threading.Thread(target=self._loop.run_forever, name=name, daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in the loop -> its result, or its exception."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
