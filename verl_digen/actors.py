# SPDX-License-Identifier: Apache-2.0
"""Liveness of Ray actors: wait for an answer, and tell if an actor is still starting."""

from __future__ import annotations

import asyncio
from typing import Any

import ray._private.state

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
