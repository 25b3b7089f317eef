# SPDX-License-Identifier: Apache-2.0
"""Calls of an actor that is out of reach for a moment (Ray's `ActorUnavailableError`): made again, it is not dead.

A call may have been executed although its answer was lost. So only calls that may be made twice go through here.

Invariant (tests/test_blips.py): pauses grow, and their sum is at most the patience.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from ray.exceptions import ActorUnavailableError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

FIRST_PAUSE_S = 0.5
"""Between the first two tries; each later pause is twice as long."""


def pauses_s(patience_s: float) -> Iterator[float]:
    """How long to wait before each further try; they add up to `patience_s`."""
    pause_s = FIRST_PAUSE_S
    while patience_s > 0:
        pause_s = min(pause_s, patience_s)
        yield pause_s
        patience_s -= pause_s
        pause_s *= 2


async def through_blips(call: Callable[[], Awaitable[Answer]], patience_s: float) -> Answer:
    """The answer of `call`, which is made again while its actor cannot be reached.

    Raises:
        ActorUnavailableError: still so after `patience_s`. Whatever else the call raises.
    """
    for pause_s in pauses_s(patience_s):
        try:
            return await call()
        except ActorUnavailableError as error:
            logger.warning("an actor cannot be reached, it is asked again in %.1f s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
    return await call()
