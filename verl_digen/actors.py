# SPDX-License-Identifier: Apache-2.0
"""Calls of Ray actors: a sign of life, actors that still start, and retries while an actor is out of reach for a moment
(Ray's `ActorUnavailableError`), which is not dead.

A call may have been executed although its answer was lost. So only calls that may be made twice go through
`through_blips`.

Invariant (tests/test_actors.py): pauses grow, and their sum is at most the patience.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, TypeVar

import ray._private.state
from ray.exceptions import ActorUnavailableError, RayActorError

from verl_digen.schedulers.deadlines import DeadlinesConfig

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


STARTING = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
"""Ray's actor states before the constructor has returned."""


def is_starting(actor: Any) -> bool:
    """True while the actor's process starts or restarts; loading a model counts."""
    return ray._private.state.actors(actor._actor_id.hex()).get("State") in STARTING


async def sign_of_life(actor: Any, deadlines: DeadlinesConfig) -> None:
    """Wait for the actor's answer to a call that does no work.

    Raises:
        RayActorError: it died, or was unreachable for a quarter of `digen.deadlines.answer_s`.
        asyncio.TimeoutError: no answer within `digen.deadlines.answer_s`.
    """
    asked = through_blips(actor.__ray_ready__.remote, deadlines.blip_s)
    await asyncio.wait_for(asked, deadlines.answer_s + deadlines.blip_s)


async def alive(actors: Sequence[Any], deadlines: DeadlinesConfig) -> list[bool]:
    """Ask all actors at once for a sign of life -> True for each that gives one in time. One that cannot be reached is
    asked again, see `sign_of_life`."""
    answers = [asyncio.ensure_future(actor.__ray_ready__.remote()) for actor in actors]
    if answers:
        await asyncio.wait(answers, timeout=deadlines.answer_s)
    asked = zip(actors, answers, strict=True)
    return list(await asyncio.gather(*(_lives(actor, answer, deadlines) for actor, answer in asked)))


async def _lives(actor: Any, answer: asyncio.Future[Any], deadlines: DeadlinesConfig) -> bool:
    """Return True if the actor lives whose answer has come, failed, or not come in time."""
    if not answer.done():
        answer.cancel()
        return False
    error = answer.exception()
    if isinstance(error, ActorUnavailableError):
        try:
            await sign_of_life(actor, deadlines)
        except (RayActorError, asyncio.TimeoutError):
            return False
    elif isinstance(error, RayActorError):
        return False
    elif error is not None:
        raise error
    return True
