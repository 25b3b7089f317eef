# SPDX-License-Identifier: Apache-2.0
"""Count of the samples of each group that wait for a replica, so that the driver can tell when replicas may sleep.

groups = GroupsBeingGenerated()
groups.begin("g", 4)
groups.ended("g", 2)                                  # generated, or failed; a second call changes nothing
await groups.until_generated("g")                     # returns once all 4 have ended
"""

from __future__ import annotations

import asyncio


class GroupsBeingGenerated:
    """See the module. Groups that were not begun are ignored."""

    def __init__(self) -> None:
        self._left: dict[str, set[int]] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def begin(self, uid: str, num_samples: int) -> None:
        """Expect samples 0 to `num_samples` - 1 of a group, before the first of them can end."""
        self._left[uid], self._ended[uid] = set(range(num_samples)), asyncio.Event()

    def ended(self, uid: str, index: int) -> None:
        """Note that a sample needs no replica any more."""
        if uid in self._left:
            self._left[uid].discard(index)
            if not self._left[uid]:
                self._ended[uid].set()

    async def until_generated(self, uid: str) -> None:
        """Return once all samples of the group have ended, and forget it."""
        try:
            await self._ended[uid].wait()
        finally:
            del self._left[uid], self._ended[uid]
