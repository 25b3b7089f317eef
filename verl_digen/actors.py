# SPDX-License-Identifier: Apache-2.0
"""Signs of life of Ray actors, and whether one that gives none is still starting."""

from __future__ import annotations

import asyncio
from typing import Any

import ray._private.state

from verl_digen.blips import through_blips
from verl_digen.schedulers.deadlines import DeadlinesConfig

STARTING = frozenset({"DEPENDENCIES_UNREADY", "PENDING_CREATION", "RESTARTING"})
"""States of Ray's before the constructor has ended."""


def is_starting(actor: Any) -> bool:
    """Whether the actor's process is being started, or started again; loading a model counts."""
    return ray._private.state.actors(actor._actor_id.hex()).get("State") in STARTING


async def sign_of_life(actor: Any, deadlines: DeadlinesConfig) -> None:
    """Wait for the actor's answer to a call that takes no work.

    Raises:
        RayActorError: it died, or was out of reach for `digen.deadlines.blip_s`.
        asyncio.TimeoutError: no answer within `digen.deadlines.answer_s`.
    """
    asked = through_blips(actor.__ray_ready__.remote, deadlines.blip_s)
    await asyncio.wait_for(asked, deadlines.answer_s + deadlines.blip_s)
