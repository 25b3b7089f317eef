# SPDX-License-Identifier: Apache-2.0
"""The groups of the open batches: their samples are issued, come back scored or are given back. Pure.

    add ----> fresh: no sample issued
                 |  issue: the first chunk binds the group to a version
                 v
              begun: samples left to issue, in flight, or scored       give_back, fail: samples return, to be reissued
                 |  accept: all samples scored                          restart: all of them, unbound
                 v
              ready --take_ready--> training --mark_trained--> trained

- Any open group may be dropped. A call that drops or restarts groups returns the ids of their chunks, which are void
  from then on: the caller cancels their generation, and their samples are no longer accepted.
- Order: (batch, order of arrival) everywhere. A chunk is cut when it is issued, so returned samples need no plan.

Invariants (tests/schedulers/test_group_book.py)
- Each sample of an open group is in exactly one state: unissued, in one live chunk, or scored. A group that is dropped
  has neither unissued samples nor live chunks.
- All live chunks and all rewards of a group are of the group's version.
- Per batch, `num_open` + `num_complete` + dropped = the groups added.

Complexity per call: O(log groups + samples of the chunk); dropping is O(chunks of the group), and completing the last
group of a batch O(its groups).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf, isfinite

from verl_digen.schedulers.batch import Batch, Group, GroupQueue, LiveChunk
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.types import BatchReport, Chunk, DropReason


class Headstart:
    """Time for groups that slots begin early, under weights that are about to be replaced.

    Such a group keeps its version, so the trainer, which has newer weights by then, cannot help with it. Where few
    slots generate, one group may take much longer than a step, and the trainer would wait for it. So where the trainer
    assisted in the last batch, or in this one, a group is begun early only if the trainer would generate it no sooner
    itself:

        now | rest of this batch | the next batch, without the group's training |
            | the group's samples on all slots ........................... | <= here, and no longer than a batch

    Simulated without this rule, `hunyuanvideo-13b` on 31 + 1 H800 takes 316.0 s a step against 247.5 s strict, with it
    247.5 s; of 300 random cases the worst takes 18.9 times as long as strict, with it 1.004 times.

    - A batch takes as long as the trainer was busy with the last one. Its waits do not count: they may be for such
      groups.
    - Of the first batch only the training is known. One group that is late would cost more than its own step: after so
      wrong a prediction the trainer does not trust its assists (`verl_digen.schedulers.search`).

    Invariant (tests/schedulers/test_group_book.py): groups that are begun early make no run longer, by more than 1 %.

    Example, batches of two groups:
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
        """True if slots that begin these samples now, `num_ahead` batches before the trainer trains them, end them in
        time, or if nothing is known yet."""
        if self._train_s is None or not (self._assists or self._last_assists):
            return True
        batch_s = self._num_groups * self._train_s if self._last_busy_s is None else self._last_busy_s
        time_s = max(0.0, batch_s - self._busy_s) + num_ahead * batch_s - self._train_s
        takes_s = max(self._fastest_s, num_samples / self._samples_per_s)
        return takes_s <= min(time_s, batch_s)


class GroupBook:
    """State of each group and sample of the open batches.

    Example, one group of two samples:
        book = GroupBook(BatchRules(1, 2))
        book.add(0, ["p0"])
        group = book.next_group(0, may_begin=True)   # Group("p0", unissued=[0, 1])
        chunk = book.issue(group, 0, size=2)         # Chunk(0, 0, "p0", (0, 1), version=0)
        book.fail(0, {1})                            # []: sample 1 is unissued again
        book.accept(0, {0: 0.1})                     # {0}
        book.issue(group, 0, size=2)                 # Chunk(1, 0, "p0", (1,), version=0)
        book.accept(1, {1: 0.9})                     # {1}
        book.complete(group)                         # []: the group is ready
        book.take_ready(book.batches[0], 1)          # ("p0",)
        book.mark_trained(book.batches[0], ["p0"])
        book.close(0)
    """

    def __init__(self, rules: BatchRules):
        self._rules = rules
        self.headstart = Headstart(rules.num_prompts)
        self.batches: dict[int, Batch] = {}
        """Number -> open batch."""
        self.groups: dict[str, Group] = {}
        """Uid -> group, of the open batches."""
        self.live: dict[int, LiveChunk] = {}
        """Id -> chunk with samples that are neither scored nor given back."""
        self._fresh = GroupQueue(None)
        self._begun: dict[int, GroupQueue] = {}
        """Version -> groups bound to it."""
        self._num_chunks = 0
        self._num_groups = 0

    # -- batches --------------------------------------------------------------------------------------------
    def num_wanted(self, number: int) -> int:
        """Number of groups to add: all for a batch not opened yet; else the missing ones, at most the refills left."""
        batch = self.batches.get(number)
        if batch is None:
            return self._rules.num_prompts + self._rules.queue.extra_prompts
        short = self._rules.num_prompts - batch.num_open - batch.num_complete
        return max(0, min(short, self._rules.max_group_refills - batch.counts.num_group_refills))

    def add(self, number: int, uids: Sequence[str]) -> None:
        """Add groups to a batch. The first call for a batch opens it; later ones are refills."""
        batch = self.batches.get(number)
        if batch is None:
            batch = self.batches[number] = Batch(number, BatchReport(number))
        else:
            batch.counts.num_group_refills += len(uids)
        for uid in uids:
            if uid in self.groups:
                raise RuntimeError(f"a uid names one group, got {uid!r} again")
            group = self.groups[uid] = Group(uid, number, self._num_groups, list(range(self._rules.group_size)))
            self._num_groups += 1
            batch.groups.append(group)
            batch.num_open += 1
            self._fresh.push(group)

    def close(self, number: int) -> None:
        """Forget a batch whose groups are all trained or dropped."""
        for group in self.batches.pop(number).groups:
            del self.groups[group.uid]

    # -- samples to issue -----------------------------------------------------------------------------------
    @property
    def begun_versions(self) -> list[int]:
        """Versions that begun groups may be bound to."""
        return list(self._begun)

    def next_group(self, version: int, *, may_begin: bool) -> Group | None:
        """Oldest group whose samples may be generated under `version`; without `may_begin` only of the groups that are
        begun."""
        begun = self._begun_front(version)
        fresh = self._fresh.front(self.groups) if may_begin else None
        if fresh is None or not self._may_begin(fresh, version):
            return begun
        return fresh if begun is None or fresh.place < begun.place else begun

    def oldest_on_policy(self, number: int) -> Group | None:
        """Oldest group of batch `number`, the oldest open one, whose samples may be generated under version
        `number`."""
        group = self.next_group(number, may_begin=True)
        return group if group is not None and group.batch == number else None

    def issue_on_policy(self, number: int, size: int) -> tuple[Chunk, ...]:
        """Cut chunks of `size` samples in all from the oldest groups that `oldest_on_policy` names, one of each; fewer
        samples if no more are left, or if an assist keeps to one group."""
        chunks: list[Chunk] = []
        while size and (group := self.oldest_on_policy(number)) is not None:
            chunks.append(self.issue(group, number, size))
            size -= len(chunks[-1].samples)
            if not self._rules.assist_spans_groups:
                break
        return tuple(chunks)

    def has_unissued(self, number: int) -> bool:
        """True if samples of batch `number`, the oldest open one, are left to issue."""
        fronts = [self._fresh.front(self.groups), *map(self._begun_front, self._begun)]
        return any(front is not None and front.batch == number for front in fronts)

    def issue(self, group: Group, version: int, size: int) -> Chunk:
        """Cut the group's next chunk, of `size` samples or all that are left."""
        if group.version is None:
            group.version = version
            self.batches[group.batch].begun[group.batch - version] += 1
            self._queue(group)
        samples = tuple(group.unissued[:size])
        del group.unissued[:size]
        chunk = Chunk(self._num_chunks, group.batch, group.uid, samples, version)
        self._num_chunks += 1
        group.chunks.add(chunk.id)
        self.live[chunk.id] = LiveChunk(chunk, set(samples))
        return chunk

    def _begun_front(self, version: int) -> Group | None:
        queue = self._begun.get(version)
        return None if queue is None else queue.front(self.groups)

    def _may_begin(self, group: Group, version: int) -> bool:
        age, num_ahead = group.batch - version, group.batch - min(self.batches)
        return age == 0 or (
            self.batches[group.batch].num_begun(age) < self._rules.stale_allowance(age)
            and self.headstart.has_time_for(self._rules.group_size, num_ahead=num_ahead)
        )

    def _queue(self, group: Group) -> None:
        """Put a begun group into the queue of its version."""
        assert group.version is not None
        self._begun.setdefault(group.version, GroupQueue(group.version)).push(group)

    # -- samples that come back -----------------------------------------------------------------------------
    def accept(self, chunk_id: int, rewards: Mapping[int, float]) -> frozenset[int]:
        """Record the rewards of a live chunk; returns the samples that it still missed. RuntimeError if a reward is not
        finite."""
        live = self.live[chunk_id]
        for index, reward in rewards.items():
            if not isfinite(reward):
                raise RuntimeError(
                    f"a reward must be finite, got {reward} for sample {index} of group {live.chunk.uid}"
                )
        accepted = live.left.intersection(rewards)
        self.groups[live.chunk.uid].rewards.update({index: rewards[index] for index in sorted(accepted)})
        self._settle(live, accepted)
        return frozenset(accepted)

    def give_back(self, chunk_id: int, samples: Iterable[int]) -> None:
        """Return samples that a live chunk will not deliver to their group, to be reissued."""
        live = self.live[chunk_id]
        group = self.groups[live.chunk.uid]
        returned = set(samples)
        group.unissued = sorted({*group.unissued, *returned})
        self._settle(live, returned)
        self._queue(group)

    def fail(self, chunk_id: int, samples: Collection[int]) -> list[int]:
        """Return failed samples of a live chunk to their group, or drop it; returns the ids of void chunks."""
        chunk = self.live[chunk_id].chunk
        batch = self.batches[chunk.batch]
        if batch.counts.num_sample_refills + len(samples) > self._rules.max_sample_refills:
            return self.drop(self.groups[chunk.uid], "failed")
        batch.counts.num_sample_refills += len(samples)
        self.give_back(chunk_id, samples)
        return []

    def restart(self, version: int) -> list[int]:
        """Make groups that have samples left under `version` fresh again, whole; returns the ids of void chunks."""
        void: list[int] = []
        while (group := self._begun_front(version)) is not None:
            batch = self.batches[group.batch]
            batch.counts.num_reissued += self._rules.group_size - len(group.unissued)
            batch.begun[group.batch - version] -= 1
            void += self._void_chunks(group)
            group.unissued = list(range(self._rules.group_size))
            group.version = None
            group.rewards.clear()
            self._fresh.push(group)
        del self._begun[version]
        return void

    def drop(self, group: Group, reason: DropReason) -> list[int]:
        """Drop a group; returns the ids of its chunks, which are void."""
        batch = self.batches[group.batch]
        group.state = "dropped"
        group.unissued.clear()
        batch.num_open -= 1
        batch.dropped[reason] += 1
        if group.version is not None:
            batch.begun[group.batch - group.version] -= 1
        return self._void_chunks(group)

    def _settle(self, live: LiveChunk, samples: set[int]) -> None:
        """Take samples off a chunk, and the chunk off its group when none is left."""
        live.left -= samples
        if not live.left:
            del self.live[live.chunk.id]
            self.groups[live.chunk.uid].chunks.remove(live.chunk.id)

    def _void_chunks(self, group: Group) -> list[int]:
        """Remove the group's chunks; returns their ids."""
        void = sorted(group.chunks)
        for chunk_id in void:
            del self.live[chunk_id]
        group.chunks.clear()
        return void

    # -- groups on their way to the trainer -----------------------------------------------------------------
    def complete(self, group: Group) -> list[int]:
        """Mark a group whose samples are all scored as ready, or drop it; returns the ids of void chunks. The group
        that fills its batch makes the others surplus."""
        batch = self.batches[group.batch]
        if self._rules.queue.drop_zero_spread and min(group.rewards.values()) == max(group.rewards.values()):
            return self.drop(group, "zero_spread")
        group.state = "ready"
        batch.num_open -= 1
        heappush(batch.ready, (group.order, group.uid))
        if batch.num_complete < self._rules.num_prompts:
            return []
        surplus = [other for other in batch.groups if other.state == "open"]
        return [chunk_id for other in surplus for chunk_id in self.drop(other, "surplus")]

    def is_last(self, batch: Batch) -> bool:
        """True if no group of the batch is still to be completed."""
        return batch.num_open == 0 and self.num_wanted(batch.number) == 0

    def fragment_size(self, batch: Batch) -> int:
        """Number of ready groups that train next; 0: the trainer waits for more. All at a barrier."""
        if not self._rules.gap.enable:
            return len(batch.ready) if self.is_last(batch) else 0
        return min(self._rules.largest_fragment, len(batch.ready))

    def take_ready(self, batch: Batch, size: int) -> tuple[str, ...]:
        """The `size` oldest ready groups, which are in training from now on."""
        uids = tuple(heappop(batch.ready)[1] for _ in range(size))
        for uid in uids:
            self.groups[uid].state = "training"
        batch.num_training += size
        return uids

    def mark_trained(self, batch: Batch, uids: Sequence[str]) -> None:
        """Record that groups in training are trained."""
        for uid in uids:
            self.groups[uid].state = "trained"
        batch.num_training -= len(uids)
        batch.num_trained += len(uids)
