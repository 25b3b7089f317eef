# SPDX-License-Identifier: Apache-2.0
"""Answers for coroutines whose requests ran as one batch."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any


def tell(callers: Iterable[asyncio.Future[Any]], outcomes: Sequence[Any]) -> None:
    """Give every caller its outcome, as many as there are callers; an exception is raised there.

    A caller that was cancelled meanwhile is passed over.
    """
    for caller, outcome in zip(callers, outcomes, strict=True):
        if caller.done():
            continue
        if isinstance(outcome, Exception):
            caller.set_exception(outcome)
        else:
            caller.set_result(outcome)
