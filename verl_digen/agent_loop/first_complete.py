# SPDX-License-Identifier: Apache-2.0
"""The first complete ones of several tasks (redundant episodes)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TypeVar

Result = TypeVar("Result")


async def first_complete(tasks: Sequence[asyncio.Task[Result]], count: int) -> tuple[list[Result], list[BaseException]]:
    """Wait until `count` of the tasks have a result, then cancel the others, and wait for all to end.

    Returns:
        Results in the order of `tasks`, fewer than `count` if too many failed; and the errors of those that failed.

    Example, three tasks that end after 1, 3 and 2 s:
        await first_complete(tasks, 2)    # ([of the first, of the third], []) after 2 s
    """
    done: set[asyncio.Task[Result]] = set()
    try:
        while len(done) < len(tasks) and sum(_is_complete(task) for task in done) < count:
            ended, _ = await asyncio.wait(set(tasks) - done, return_when=asyncio.FIRST_COMPLETED)
            done |= ended
    finally:
        for task in tasks:
            task.cancel()  # no effect on one that has ended
    await asyncio.gather(*tasks, return_exceptions=True)
    complete = [task for task in tasks if _is_complete(task)][:count]
    errors = [error for task in tasks if not task.cancelled() and (error := task.exception()) is not None]
    return [task.result() for task in complete], errors


def _is_complete(task: asyncio.Task[Result]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is None
