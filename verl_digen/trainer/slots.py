# SPDX-License-Identifier: Apache-2.0
"""Slots and their replicas: new weights between two chunks, and replicas that are lost, given up, or join."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from verl_digen.errors import DeadlineMissed
from verl_digen.observe.timeline import Lane, Recorder
from verl_digen.processes.calls import CallsUnderWay
from verl_digen.processes.deadlines import Deadlines
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.trainer.lanes import IdleLanes, Joining
from verl_digen.trainer.pools import GeneratorPool

logger = logging.getLogger(__name__)


class ReplicaSlots:
    """Args:
    go_on: called after a change of the plan that no caller knows of.
    """

    def __init__(
        self,
        planner: BatchPlanner,
        generator: GeneratorPool,
        calls: CallsUnderWay,
        deadlines: Deadlines,
        recorder: Recorder,
        idle: IdleLanes,
        *,
        go_on: Callable[[], None],
    ):
        self._planner, self._generator, self._calls, self._deadlines = planner, generator, calls, deadlines
        self._recorder, self._idle, self._go_on = recorder, idle, go_on
        self.slots_of: dict[str, Sequence[str]] = {}
        """Slot -> all slots of its replica."""
        self.lanes: dict[str, Lane] = {}
        """Slot -> lane of its replica."""
        self._unloaded: set[str] = set()
        """Slots that wait for the other slots of their replica before it loads new weights."""

    def join(self, replica: Joining, version: int) -> None:
        """Add the slots of a replica that has `version`."""
        self._idle.stop(replica.lane)
        for slot in replica.slots:
            self.slots_of[slot] = replica.slots
            self.lanes[slot] = replica.lane
            self._planner.on_slot_joined(slot, replica=replica.replica, version=version)

    def unload(self, slot: str) -> None:
        """Mark the slot ready for new weights; its replica loads them when all of its slots are ready."""
        self._unloaded.add(slot)
        slots = [other for other in self.slots_of[slot] if self._planner.has_slot(other)]
        if self._unloaded.issuperset(slots):
            self._unloaded.difference_update(slots)
            self._calls.spawn(self._load(slots))

    async def _load(self, slots: Sequence[str]) -> None:
        """Have the replica of these slots load the newest weights."""
        slot, newest = slots[0], self._planner.published
        lane = self.lanes[slot]
        self._idle.stop(lane)
        try:
            with self._recorder.interval("publish", lane, step=newest, version=newest):
                what, bound = f"loading version {newest} on slot {slot}", self._deadlines.bound("load", slot)
                version, took_s = await self._calls.call(self._generator.load(slots), what=what, bound=bound)
        except DeadlineMissed as error:
            self.give_up(slot, error)
        else:
            if version is None:
                self.lose(slot)
            else:
                self._deadlines.observe("load", slot, seconds=took_s)
                for loaded in slots:
                    if self._planner.has_slot(loaded):  # else reported lost while it loaded
                        self._planner.on_loaded(loaded, version)
        self._go_on()

    def give_up(self, slot: str, error: DeadlineMissed) -> None:
        """Drop a hung replica and kill its processes."""
        logger.error("the replica of slot %s is given up: %s", slot, error)
        self.lose(slot)
        self._calls.tell(self._generator.end_replica(self.slots_of[slot]), f"ending the replica of slot {slot}")

    def lose(self, slot: str) -> None:
        """Take all slots of a dead replica out of the plan. No effect on slots that are out already."""
        for lost in self.slots_of[slot]:
            self._unloaded.discard(lost)
            if self._planner.has_slot(lost):
                logger.warning("slot %s is lost; the samples it was generating go to others", lost)
                self._planner.on_slot_lost(lost)
                self._idle.wait(self.lanes[lost], "slot_lost", self._planner.batch + 1)
