# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run and are meant for the person who started it, and what other errors say."""

import asyncio
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

from ray.exceptions import RayTaskError


class RunStopped(RuntimeError):
    """The run cannot continue. The message says why and what to do; shown as one paragraph, without a traceback."""


class DeadlineMissed(RunStopped):
    """Timeout of a call that the run cannot continue without."""

    def __init__(self, what: str, waited_s: float, key: str):
        super().__init__(what, waited_s, key)  # as they are, so that another process can make it again

    def __str__(self) -> str:
        what, waited_s, key = self.args
        return (
            f"{what} has not been answered for {waited_s:.0f} s: a process hangs, is stopped, or waits in a collective "
            f"for one that is. If it is only slow, raise {key}"
        )


class ProcessLost(RunStopped):
    """A process that the run cannot continue without died, or does not respond."""


class ReplicasLost(RunStopped):
    """No replica is alive. On separate pools the run ends only if none can be started in place of one."""

    def __str__(self) -> str:
        return (
            "every rollout replica is lost (their processes died or hung): look for the reason above, out of memory is "
            "common"
        )


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Context that calls the user's code: a SystemExit, which would end the process's event loop, is a RuntimeError."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"it raised SystemExit: {error}") from error


async def call_users(function: Callable[..., Any], *args: Any, executor: Executor | None = None) -> Any:
    """The result of the user's function: a sync one runs in a thread of `executor`, an async one here."""
    with exits_as_errors():
        if inspect.iscoroutinefunction(function):
            return await function(*args)
        in_context = partial(copy_context().run, function, *args)
        found = await asyncio.get_running_loop().run_in_executor(executor, in_context)
        return await found if inspect.isawaitable(found) else found


def plain(error: BaseException) -> BaseException:
    """The exception raised in the remote process, without the traceback Ray wraps around it."""
    return error.cause if isinstance(error, RayTaskError) else error


def describe(error: BaseException) -> str:
    """One line for a tag: the innermost message, without the remote traceback Ray adds."""
    cause = plain(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
