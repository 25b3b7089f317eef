# SPDX-License-Identifier: Apache-2.0
"""Time for groups that slots begin early, under weights that are about to be replaced. Pure.

Such a group keeps its version, so the trainer, which has newer weights by then, cannot help with it. Where few slots
generate, one group may take much longer than a step, and the trainer would wait for it. So where the trainer assisted
in the last batch, or in this one, a group is begun early only if the trainer would generate it no sooner itself:

Simulated without this rule, `hunyuanvideo-13b` on 31 + 1 H800 takes 316.0 s a step against 247.5 s strict, with it
247.5 s; of 300 random cases the worst takes 18.9 times as long as strict, with it 1.004 times.

    now | rest of this batch | the next batch, without the group's training |
        | the group's samples on all slots ........................... | <= here, and no longer than a batch

- A batch takes as long as the trainer was busy with the last one. Its waits do not count: they may be for such groups.
- Of the first batch only the training is known. One group that is late would cost more than its own step: after so
  wrong a prediction the trainer does not trust its assists (`verl_digen.schedulers.foresight`).

Invariant (tests/schedulers/test_headstart.py): groups that are begun early make no run longer, by more than 1 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from verl_digen.schedulers.durations import Durations


class Headstart:
    """Args:
    num_groups: groups of a batch.

    Example:
        headstart = Headstart(num_groups=2)
        headstart.on_worked(1.0, ["a", "b"], durations)     # a sample takes 4 s on a slot; a group trains for 5 s
        headstart.on_worked(9.0, ["a", "b"], durations, assists=True)
        headstart.on_next_batch()
        headstart.on_worked(8.0, ["a", "b"], durations)     # 2 s of this batch are left
        headstart.has_time_for(3, num_ahead=1)              # True: 6 s on two slots, of 2 + 10 - 5 s
        headstart.has_time_for(4, num_ahead=1)              # False
    """

    def __init__(self, num_groups: int):
        self._num_groups = num_groups
        self._busy_s = 0.0
        self._last_busy_s: float | None = None
        self._assists = self._last_assists = False
        self._fastest_s = 0.0
        """Seconds of a sample on the fastest slot."""
        self._samples_per_s = inf
        """Speed of all slots; infinite while nothing is known."""
        self._train_s: float | None = None

    def on_worked(self, seconds: float, slots: Iterable[str], durations: Durations, *, assists: bool = False) -> None:
        """The trainer has trained, or assisted, for so long; `slots` generate."""
        self._busy_s += seconds
        self._assists |= assists
        known_s = [sample_s for sample_s in map(durations.generate_sample_s, slots) if sample_s is not None]
        self._fastest_s = min(known_s, default=0.0)
        self._samples_per_s = sum(1 / sample_s for sample_s in known_s) if self._fastest_s > 0 else inf
        if (train_s := durations.train_s()) is not None:
            _, self._train_s = train_s

    def on_next_batch(self) -> None:
        """The trainer goes on to the next batch."""
        self._last_busy_s, self._busy_s = self._busy_s, 0.0
        self._last_assists, self._assists = self._assists, False

    def has_time_for(self, num_samples: int, *, num_ahead: int) -> bool:
        """True if slots that begin these samples now end them in time, or if nothing is known yet.

        Args:
            num_ahead: batches from the trainer's to theirs.
        """
        if self._train_s is None or not (self._assists or self._last_assists):
            return True
        batch_s = self._num_groups * self._train_s if self._last_busy_s is None else self._last_busy_s
        time_s = max(0.0, batch_s - self._busy_s) + num_ahead * batch_s - self._train_s
        takes_s = max(self._fastest_s, num_samples / self._samples_per_s)
        return takes_s <= min(time_s, batch_s)
