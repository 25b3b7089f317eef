# SPDX-License-Identifier: Apache-2.0
"""Calls of one Ray actor, which may be away, dead, hung or slow.

| the actor | Ray | here |
| --- | --- | --- |
| is out of reach for a moment | `ActorUnavailableError` | it is asked again, for `DeadlinesConfig.blip_s` |
| is dead | another `RayActorError` | the error is raised |
| hangs | no answer | a call without work is not answered for `digen.deadlines.answer_s`: `silence` tells |
| starts, starts again, or works for long | no answer | it is waited for: `while_alive` |

A call may have been executed although its answer was lost. So only calls that may be made twice are retried.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import ray._private.state
from ray.exceptions import ActorUnavailableError, RayActorError

from verl_digen.processes.deadlines import DeadlinesConfig

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MAX_CALLS = 100_000
"""Maximum concurrent calls of an actor. With Ray's 1000 a sign of life would queue behind the samples of a batch."""

FIRST_PAUSE_S = 0.5
"""Between the first two tries; each later pause is twice as long."""

STARTING = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
"""Ray's actor states before the constructor has returned."""


def pauses_s(patience_s: float) -> Iterator[float]:
    """How long to wait before each further try; they add up to `patience_s`."""
    pause_s = FIRST_PAUSE_S
    while patience_s > 0:
        pause_s = min(pause_s, patience_s)
        yield pause_s
        patience_s -= pause_s
        pause_s *= 2


async def retried(
    call: Callable[[], Awaitable[Answer]], patience_s: float, on: type[Exception] = ActorUnavailableError
) -> Answer:
    """The answer of `call`, which is made again while it raises `on`, for `patience_s`: while its actor cannot be
    reached."""
    for pause_s in pauses_s(patience_s):
        try:
            return await call()
        except on as error:
            logger.warning("tried again in %.1f s: %s", pause_s, error)
        await asyncio.sleep(pause_s)
    return await call()


def is_starting(actor: Any) -> bool:
    """True while the actor's process starts or restarts; loading a model counts."""
    return ray._private.state.actors(actor._actor_id.hex()).get("State") in STARTING


async def silence(
    actor: Any, config: DeadlinesConfig, method: str = "__ray_ready__"
) -> asyncio.TimeoutError | RayActorError | None:
    """Ask for a sign of life, by a method without work and arguments -> None, or why there is none: TimeoutError if the
    actor hangs, else it is lost."""
    ask = getattr(actor, method).remote
    try:
        await retried(lambda: asyncio.wait_for(ask(), config.answer_s), config.blip_s)
    except asyncio.TimeoutError as error:
        return None if is_starting(actor) else error
    except RayActorError as error:
        return error
    return None


async def while_alive(
    call: Awaitable[Answer], every_s: Callable[[], float], check: Callable[[], Awaitable[None]]
) -> Answer:
    """The answer of a call, with no timeout of its own. `check`, every `every_s()` seconds, looks whether the actor is
    alive, and ends the wait by raising, or by killing the actor."""
    answering = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([answering], timeout=every_s()))[0]:
            await check()
    finally:
        answering.cancel()
    return answering.result()
