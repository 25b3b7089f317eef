# SPDX-License-Identifier: Apache-2.0
"""Announcements: while the trainer trains a fragment, its ranks are told which groups train next.

The ranks fetch the rows of that fragment while their last tile runs, see `verl_digen.engine.ahead`. An announcement is
a hint: another fragment may train, and nothing waits for it. It takes one write to TransferQueue per group that
completes while the trainer trains.

Invariant (tests/trainer/test_announcements.py): the newest announcement names what the planner would train if the
trainer ended now.
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_digen.schedulers.deadlines import Deadlines
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.trainer.calls import CallsUnderWay, log_overdue
from verl_digen.trainer.ports import Trainer
from verl_digen.trainer.published import PublishedSamples
from verl_digen.types import GroupTags


class Announcements:
    """See the module; one call is in flight at a time, so that they arrive in order."""

    def __init__(self, planner: BatchPlanner, trainer: Trainer, calls: CallsUnderWay, deadlines: Deadlines):
        self._planner, self._trainer, self._calls, self._deadlines = planner, trainer, calls, deadlines
        self._told: tuple[int, tuple[str, ...]] | None = None
        """Fragment in training and the groups after it, of the last announcement."""
        self._is_under_way = False

    def update(self, published: Mapping[int, PublishedSamples]) -> None:
        """Announce what is new. Call after every event.

        Args:
            published: batch -> its published samples.
        """
        found = None if self._is_under_way else self._planner.upcoming()
        if found is None or not found[1]:
            return
        fragment, uids = found
        if (fragment.id, uids) == self._told:
            return
        self._told = fragment.id, uids
        groups = {uid: published[fragment.batch].groups[uid] for uid in uids}
        self._is_under_way = True
        self._calls.tell(
            self._announce(fragment.id, groups), "announcing the next fragment", self._deadlines, log_overdue
        )

    async def _announce(self, fragment_id: int, groups: Mapping[str, GroupTags]) -> None:
        try:
            await self._trainer.announce(fragment_id, groups)
        finally:
            self._is_under_way = False
