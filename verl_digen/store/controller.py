# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's processes: start, end, the controller's handle, and cancellation of calls that wait for it.

Its client waits for the controller without a deadline, so a controller that died or hangs would stop every process
that calls it. The driver asks for heartbeats (`verl_digen.trainer.heartbeats`) and cancels its own calls here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
import transfer_queue as tq


def start(config: Any) -> None:
    """Start TransferQueue; `config` is verl's section `transfer_queue`."""
    tq.init(config)


def close() -> None:
    """End TransferQueue's processes."""
    tq.close()


def controller() -> Any:
    """The controller's actor."""
    return ray.get_actor("TransferQueueController", namespace="transfer_queue")


def cancel_calls() -> None:
    """Fail this process's blocking calls in flight with `concurrent.futures.CancelledError`, and no later ones."""
    loop: asyncio.AbstractEventLoop = tq.get_client()._loop

    def cancel_all() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    loop.call_soon_threadsafe(cancel_all)
