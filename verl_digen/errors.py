# SPDX-License-Identifier: Apache-2.0
"""Errors that end a run and are meant for the person who started it."""

from __future__ import annotations

from ray.exceptions import RayTaskError


class RunStopped(RuntimeError):
    """The run cannot go on, and the message says why and what to do: shown as one paragraph, without a traceback."""


def plain(error: BaseException) -> BaseException:
    """What was raised in the remote process, without the traceback Ray wraps around it."""
    return error.cause if isinstance(error, RayTaskError) else error
