# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run and are meant for the person who started it."""

from __future__ import annotations

from ray.exceptions import RayTaskError


class RunStopped(RuntimeError):
    """The run cannot go on, and the message says why and what to do: shown as one paragraph, without a traceback."""


class DeadlineMissed(RunStopped):
    """A call that the run cannot go on without has not been answered in time."""

    def __init__(self, what: str, waited_s: float, key: str):
        super().__init__(
            f"{what} has not been answered for {waited_s:.0f} s: a process hangs, is stopped, or waits in a collective "
            f"for one that is. If it is only slow, raise {key}"
        )


class ProcessLost(RunStopped):
    """A process that the run cannot go on without died, or gives no sign of life."""


def plain(error: BaseException) -> BaseException:
    """What was raised in the remote process, without the traceback Ray wraps around it."""
    return error.cause if isinstance(error, RayTaskError) else error


def describe(error: BaseException) -> str:
    """One line for a tag: the innermost message, without the remote traceback Ray adds."""
    cause = plain(error)
    return f"{type(cause).__name__}: {cause}".splitlines()[0]
