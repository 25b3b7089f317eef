# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's client of this process, for several threads, and TransferQueue's processes.

- TransferQueue makes the client in a process's first call, and other threads see it before it can be used: a second
  call meanwhile fails with "Storage manager not initialized". So the first call of a process runs alone.
- Its client waits for the controller without a deadline, so a controller that died or hangs would stop every process
  that calls it. The driver asks for heartbeats (`verl_digen.processes.supervision`) and cancels its own calls here.

Invariant (tests/store/test_client.py): no call begins before the first one has ended; later ones run side by side.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import ray
import transfer_queue as tq

Result = TypeVar("Result")


class FirstAlone:
    """Runs calls of any thread; until one has succeeded, one at a time.

    Example:
        calls = FirstAlone()
        calls.run(lambda: 1)    # 1; a call of another thread waits meanwhile
        calls.run(lambda: 2)    # 2; beside calls of other threads
    """

    def __init__(self) -> None:
        self._making = threading.Lock()
        self._is_made = False

    def run(self, call: Callable[[], Result]) -> Result:
        if self._is_made:
            return call()
        with self._making:
            result = call()
            self._is_made = True
            return result


CLIENT = FirstAlone()
"""Calls of this process that several threads may make."""


def start(config: Any) -> None:
    """Start TransferQueue; `config` is verl's section `transfer_queue`."""
    tq.init(config)


def close() -> None:
    """End TransferQueue's processes."""
    tq.close()


def controller() -> Any:
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def cancel_calls() -> None:
    """Fail this process's blocking calls in flight with `concurrent.futures.CancelledError`, and no later ones."""
    loop: asyncio.AbstractEventLoop = tq.get_client()._loop

    def cancel_all() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    loop.call_soon_threadsafe(cancel_all)
