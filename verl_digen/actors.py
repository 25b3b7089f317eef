# SPDX-License-Identifier: Apache-2.0
"""Liveness of Ray actors: wait for an answer, and tell if an actor is still starting."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray._private.state
from ray.exceptions import ActorUnavailableError, RayActorError

from verl_digen.blips import through_blips
from verl_digen.schedulers.deadlines import DeadlinesConfig

STARTING = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
"""Ray's actor states before the constructor has returned."""


def is_starting(actor: Any) -> bool:
    """True while the actor's process starts or restarts; loading a model counts."""
    return ray._private.state.actors(actor._actor_id.hex()).get("State") in STARTING


async def sign_of_life(actor: Any, deadlines: DeadlinesConfig) -> None:
    """Wait for the actor's answer to a call that does no work.

    Raises:
        RayActorError: it died, or was unreachable for `digen.deadlines.blip_s`.
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
