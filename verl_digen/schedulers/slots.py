# SPDX-License-Identifier: Apache-2.0
"""The generator's slots: their state and weight version; the next free one is on the least-loaded replica, ties by slot
id.

Complexity: O(slots of the replica * log slots) when a slot becomes busy or free, else O(log slots).
"""

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Literal


@dataclass(slots=True)
class Slot:
    """One unit of a replica's concurrency: it works on one chunk at a time."""

    id: str
    replica: str
    version: int
    """Weight version it has; while loading, the old one."""
    state: Literal["idle", "busy", "loading"] = "idle"


class SlotPool:
    """All slots that are alive.

    Example:
        pool = SlotPool()
        pool.join("a/0", replica="a", version=3)
        pool.take(3)            # Slot("a/0", state="busy")
        pool.take(3)            # None
        pool.release("a/0")     # idle again
        pool.unload(3)          # [Slot("a/0", state="loading")]: version 3 is left
        pool.load("a/0", 4)     # idle, at version 4
    """

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._of_replica: dict[str, list[Slot]] = {}
        self._num_busy: Counter[str] = Counter()
        """Replica -> number of its busy slots."""
        self._idle: dict[int, list[tuple[int, str]]] = {}
        """Version -> heap of (busy slots of the replica, slot id). Entries may be stale; `_pop_idle` skips those."""
        self._num_at: Counter[int] = Counter()
        """Version -> number of slots that have it and are not loading another."""

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot_id: str) -> bool:
        return slot_id in self._slots

    @property
    def ids(self) -> list[str]:
        """Slot ids, ascending."""
        return sorted(self._slots)

    def idle_versions(self) -> list[int]:
        """Versions that idle slots may have, oldest first."""
        return sorted(self._idle)

    def has(self, version: int) -> bool:
        """True if any slot has `version` and is not loading another."""
        return self._num_at[version] > 0

    def join(self, slot_id: str, *, replica: str, version: int) -> None:
        """Add a slot, idle."""
        if slot_id in self._slots:
            raise RuntimeError(f"a slot joins once, got {slot_id!r} again; report it lost first")
        slot = self._slots[slot_id] = Slot(slot_id, replica, version)
        self._of_replica.setdefault(replica, []).append(slot)
        self._enter(slot)

    def lose(self, slot_id: str) -> Slot:
        """Remove a lost slot and return it in its last state."""
        slot = self._slots.pop(slot_id)
        self._of_replica[slot.replica].remove(slot)
        if slot.state == "busy":
            self._count_busy(slot.replica, -1)
        if slot.state != "loading":
            self._num_at[slot.version] -= 1
        return slot

    def take(self, version: int) -> Slot | None:
        """Mark the next idle slot of `version` busy and return it; None if there is none."""
        slot = self._pop_idle(version)
        if slot is not None:
            slot.state = "busy"
            self._count_busy(slot.replica, 1)
        return slot

    def release(self, slot_id: str) -> None:
        """Mark a busy slot idle."""
        slot = self._slots[slot_id]
        slot.state = "idle"
        self._count_busy(slot.replica, -1)

    def unload(self, version: int) -> list[Slot]:
        """Mark all idle slots of `version` as loading and return them."""
        slots: list[Slot] = []
        while (slot := self._pop_idle(version)) is not None:
            slot.state = "loading"
            self._num_at[slot.version] -= 1
            slots.append(slot)
        self._idle.pop(version, None)
        return slots

    def load(self, slot_id: str, version: int) -> None:
        """Mark a loading slot idle, with `version`."""
        slot = self._slots[slot_id]
        if slot.state != "loading":
            raise RuntimeError(f"a slot loads weights after `unload`, got {slot_id!r}, which is {slot.state}")
        slot.version = version
        slot.state = "idle"
        self._enter(slot)

    def _enter(self, slot: Slot) -> None:
        self._num_at[slot.version] += 1
        self._push_idle(slot)

    def _push_idle(self, slot: Slot) -> None:
        heappush(self._idle.setdefault(slot.version, []), (self._num_busy[slot.replica], slot.id))

    def _pop_idle(self, version: int) -> Slot | None:
        heap = self._idle.get(version, [])
        while heap:
            num_busy, slot_id = heappop(heap)
            slot = self._slots.get(slot_id)
            is_true = slot is not None and slot.state == "idle" and slot.version == version
            if slot is not None and is_true and num_busy == self._num_busy[slot.replica]:
                return slot
        return None

    def _count_busy(self, replica: str, change: int) -> None:
        """Change the replica's busy count and requeue its idle slots by the new load."""
        self._num_busy[replica] += change
        for slot in self._of_replica[replica]:
            if slot.state == "idle":
                self._push_idle(slot)
