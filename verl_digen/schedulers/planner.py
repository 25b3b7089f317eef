# SPDX-License-Identifier: Apache-2.0
"""The open batches as one state machine: events in, decisions out; runs live and in the simulator alike.

    on_prompts ----> groups without a sample issued (fresh)
                        |  assign: a free slot begins the oldest admissible group ...
                        v
                     groups with samples left to issue (begun, bound to a version)
                        |  ... or takes the next chunk of the oldest begun one; the trainer may assist, with chunks of
                        |  as many of the oldest groups as keep its ranks busy
                        v
    on_generated     the slot is free for the next chunk         on_failed, on_slot_lost: samples go back
    on_scored        group complete -> ready                       (or the group is dropped, beyond the bounds)
                        |  next_for_trainer: a ready fragment always goes first (or waits, once, to become larger)
                        v
    on_trained       trained; all of the batch settled -> BatchReport
    on_committed     the next batch is the trainer's
    on_published     free slots take the new version (LoadWeights, on_loaded), each between two chunks

- Staleness: a begun group stays with its version: slots that have it take its samples before they load a newer one; if
  no slot has it any more, the group is restarted. `BatchRules.stale_allowance` and `Headstart` say how many groups may
  be stale.
- Bubble: the trainer is free, has no ready fragment, and the batch is not settled. `digen.tag.policy` says what the
  trainer does then.
- Redundancy: a batch begins with P + extra groups and is full when P are complete; the others are dropped.

| who waits | for whom | bound |
| --- | --- | --- |
| a free slot | admissible samples | one chunk per slot in flight |
| trainer | a ready fragment | one training call, assist or commit at a time |
| a ready group | the trainer | P + extra groups of each of 1 + `max_versions` batches |
| batch b + 1 | commit of b | opened when it may be begun |

Invariants (tests/schedulers/test_planner.py)
- A sample is regenerated only if its chunk failed, was lost or cancelled, or its group restarted; these are counted.
- A group is trained at most once, and only if all its samples are scored, all under its version.
- A ready fragment trains before an assist, and at most one assist is in flight, with at most one chunk of a group.
- No chunk is issued while an older group that the slot may take has samples left.
- A group is at most `max_versions` versions stale, and no more groups are stale than allowed.
- trained + dropped = drawn, per batch.

Complexity per event or decision: O(log groups + log slots) per chunk + O(samples), plus the search at a bubble; per
task of the trainer O(slots log slots). Memory O(samples of the open batches).
"""

from collections.abc import Iterable, Mapping, Sequence

from verl_digen.schedulers.batch import Batch, ChunkRequest
from verl_digen.schedulers.bubbles import bubble_at, idle_reason
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.group_book import GroupBook
from verl_digen.schedulers.play import EPSILON_S
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.search import Foresight, decide
from verl_digen.schedulers.slots import SlotPool
from verl_digen.schedulers.types import (
    TRAINER,
    Assist,
    AssistReason,
    BatchReport,
    Chunk,
    Fragment,
    Generate,
    LoadWeights,
    SlotDecision,
    TrainerDecision,
    Wait,
)


class BatchPlanner:
    """State machine of the open batches.

    The search at a bubble reads `durations`, to which the planner reports those that it observes. `first_batch` is the
    trainer's weight version at the start: 0, or that of the checkpoint resumed from.

    Example, one slot, one group of two samples, one batch:
        planner = BatchPlanner(BatchRules(1, 2), durations, first_batch=0, num_batches=1)
        planner.on_slot_joined("a", replica="a", version=0)
        planner.prompts_wanted()                    # {0: 1}
        planner.on_prompts(0, ["p0"])
        planner.assign(0.0)                         # [Generate("a", Chunk(0, 0, "p0", (0, 1), version=0))]
        planner.next_for_trainer(0.0)               # Wait("no_fragment_ready")
        planner.on_generated(0, 4.0)                # the slot is free
        planner.on_scored(0, {0: 0.1, 1: 0.9}, 0, 4.5)
        planner.next_for_trainer(4.5)               # Fragment(0, 0, ("p0",)): it trains
        planner.on_trained(0, 6.0)
        planner.next_for_trainer(6.0)               # BatchReport(batch=0, uids=("p0",), num_samples=2, ...)
        planner.on_committed(0)
        planner.on_published(1)
    """

    def __init__(self, rules: BatchRules, durations: Durations, *, first_batch: int, num_batches: int):
        self.rules = rules
        self.batch = first_batch
        """Number of the batch that the trainer works on; equals the trainer's weight version."""
        self.published = first_batch
        """Newest version that slots can load."""
        self._durations = durations
        self._end = first_batch + num_batches
        self._slots = SlotPool()
        self._book = GroupBook(rules)
        self._requests: dict[int, ChunkRequest] = {}
        self._cancelled: list[int] = []
        self._trainer: Fragment | Assist | BatchReport | None = None
        """Current task of the trainer: training, assist, commit or None."""
        self._assisting: set[int] = set()
        """Ids of the chunks of the current assist that are still being generated."""
        self._trainer_since_s = 0.0
        self._foresight = Foresight()
        self._wait_until_s: float | None = None
        """Time until which the search said to wait; None: ask it."""
        self._num_fragments = 0

    # -- prompts --------------------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        """True once every batch is committed."""
        return self.batch >= self._end

    def prompts_wanted(self) -> dict[int, int]:
        """Batch -> prompts to draw for it now: for batches that may be begun, and to replace dropped groups."""
        last = min(self.batch + self.rules.staleness.max_versions, self._end - 1)
        wanted = {number: self._book.num_wanted(number) for number in range(self.batch, last + 1)}
        return {number: count for number, count in wanted.items() if count}

    def on_prompts(self, number: int, uids: Sequence[str]) -> None:
        """Add prompts drawn for batch `number`, each the uid of a group. The batch's first call brings all of them."""
        wanted, is_open = self.prompts_wanted(), number in self._book.batches
        if number not in wanted or len(uids) > wanted[number] or (not is_open and len(uids) < wanted[number]):
            raise RuntimeError(f"prompts are drawn as wanted (batch -> number {wanted}), got {len(uids)} for {number}")
        self._book.add(number, uids)
        self._disturb()

    # -- slots ----------------------------------------------------------------------------------------------
    def on_slot_joined(self, slot: str, *, replica: str, version: int) -> None:
        """Add a free slot with the weights of `version`."""
        if version > self.published:
            raise RuntimeError(f"slots have published versions, <= {self.published}, got {version} in {slot!r}")
        self._slots.join(slot, replica=replica, version=version)
        self._disturb()

    def has_slot(self, slot: str) -> bool:
        """True if the slot joined and is not lost."""
        return slot in self._slots

    def on_slot_lost(self, slot: str) -> None:
        """Remove a lost slot; the samples it was generating are reissued."""
        if self._slots.lose(slot).state == "busy":
            chunk_id = next(chunk_id for chunk_id, request in self._requests.items() if request.generator == slot)
            self._end_request(chunk_id)
            if (live := self._book.live.get(chunk_id)) is not None:
                self._book.batches[live.chunk.batch].counts.num_reissued += len(live.left)
                self._book.give_back(chunk_id, live.left)
        self._disturb()

    def on_published(self, version: int) -> None:
        """Weights of `version` can be loaded by slots from now on."""
        if not self.published <= version <= self.batch:
            raise RuntimeError(f"the version published must lie in [{self.published}, {self.batch}], got {version}")
        self.published = version

    def on_loaded(self, slot: str, version: int) -> None:
        """A slot has loaded `version`, as `LoadWeights` said."""
        self._slots.load(slot, version)

    def assign(self, now_s: float, *, begins: bool = True) -> list[SlotDecision]:
        """Decisions for free slots, least-loaded replica first. Call after every event; O(versions) if there is none.
        Without `begins` begun groups are finished and new weights loaded, but no group is begun."""
        decisions: list[SlotDecision] = []
        self._restart_orphans()
        for version in self._slots.idle_versions():
            # a slot with older weights loads the newer ones before it begins a group
            may_begin = begins and version == self.published
            while (group := self._book.next_group(version, may_begin=may_begin)) is not None:
                slot = self._slots.take(version)
                if slot is None:
                    break
                chunk = self._book.issue(group, version, self.rules.slot_chunk_size(len(self._slots)))
                self._send(chunk, slot.id, now_s)
                decisions.append(Generate(slot.id, chunk))
            if version < self.published:
                decisions += [LoadWeights(slot.id, self.published) for slot in self._slots.unload(version)]
        return decisions

    def _restart_orphans(self) -> None:
        """Restart groups whose version no slot has any more, with all their samples, under a newer one."""
        for version in self._book.begun_versions:
            if version < self.published and not self._slots.has(version):
                self._cancel(self._book.restart(version))

    # -- samples on their way -------------------------------------------------------------------------------
    def _send(self, chunk: Chunk, generator: str, now_s: float) -> None:
        self._requests[chunk.id] = ChunkRequest(chunk, generator, now_s)
        self._book.batches[chunk.batch].num_requests += 1

    def _end_request(self, chunk_id: int) -> ChunkRequest | None:
        request = self._requests.pop(chunk_id, None)
        if request is not None and request.chunk.batch in self._book.batches:
            self._book.batches[request.chunk.batch].num_requests -= 1
        return request

    def on_generated(self, chunk_id: int, now_s: float) -> None:
        """A generation request has ended, successfully or not: its generator is free. Ignored if its slot was lost."""
        request = self._end_request(chunk_id)
        if request is None:
            return
        if (live := self._book.live.get(chunk_id)) is not None:
            live.generated_s = now_s
        if request.generator == TRAINER:
            self._on_assisted(chunk_id, now_s)
            return
        self._slots.release(request.generator)
        if not request.is_cancelled:  # else possibly aborted: its duration says nothing about the speed
            self._durations.on_generated(request.generator, len(request.chunk.samples), now_s - request.since_s)

    def _on_assisted(self, chunk_id: int, now_s: float) -> None:
        """Free the trainer with the last chunk of its assist; the ranks generate cancelled ones, too."""
        assist = self._trainer
        assert isinstance(assist, Assist)
        self._assisting.discard(chunk_id)
        if not self._assisting:
            self._trainer = None
            took_s = now_s - self._trainer_since_s
            self._durations.on_assisted(self.rules.assist_rounds(assist.num_samples), took_s)
            self._book.headstart.on_worked(took_s, self._slots.ids, self._durations, assists=True)

    def on_scored(self, chunk_id: int, rewards: Mapping[int, float], version: int, now_s: float) -> frozenset[int]:
        """Record rewards of a chunk's samples, by index; before or after `on_generated`, at once or one by one. Returns
        the accepted samples; discard the others.

        `version` is recorded with the trajectories. Samples of another version than the chunk's count as failed, and
        are a RuntimeError in strict mode, as is a reward that is not finite.
        """
        live = self._book.live.get(chunk_id)
        if live is None:
            self._count_late(len(rewards))
            return frozenset()
        chunk = live.chunk
        if version != chunk.version:
            if self.rules.staleness.max_versions == 0:
                raise RuntimeError(
                    f"chunk {chunk_id} of group {chunk.uid} must be generated under version {chunk.version}, got "
                    f"{version}; with digen.staleness.max_versions=0 no sample of another version may exist"
                )
            self.on_failed(chunk_id, list(rewards))
            return frozenset()
        accepted = self._book.accept(chunk_id, rewards)
        self._count_late(len(rewards) - len(accepted))
        if not live.left and live.generated_s is not None:
            self._durations.on_scored(now_s - live.generated_s)
        group = self._book.groups[chunk.uid]
        if len(group.rewards) == self.rules.group_size:
            self._cancel(self._book.complete(group))
            if group.state == "dropped":
                self._disturb()
        return accepted

    def on_failed(self, chunk_id: int, samples: Sequence[int]) -> None:
        """Samples of a chunk have no trajectory or no reward: regenerate them, or drop their group."""
        live = self._book.live.get(chunk_id)
        failed = set() if live is None else live.left.intersection(samples)
        if live is None or not failed:
            return
        self._cancel(self._book.fail(chunk_id, failed))
        self._disturb()

    def take_cancelled(self) -> list[int]:
        """Ids of the chunks that became void since the last call. Abort those in generation, or not: `on_generated` is
        due. The scores of the others are not wanted."""
        cancelled, self._cancelled = self._cancelled, []
        return cancelled

    def _cancel(self, chunk_ids: Iterable[int]) -> None:
        """Note void chunks, and mark the requests of those that are still being generated."""
        for chunk_id in chunk_ids:
            request = self._requests.get(chunk_id)
            if request is not None:
                request.is_cancelled = True
            self._cancelled.append(chunk_id)

    def _count_late(self, num_samples: int) -> None:
        batch = self._book.batches.get(self.batch)
        if batch is not None:
            batch.counts.num_late += num_samples

    # -- the trainer ----------------------------------------------------------------------------------------
    def next_for_trainer(self, now_s: float) -> TrainerDecision:
        """Next task of the free trainer. Call `assign` first: slots have the first choice of chunks."""
        if self._trainer is not None:
            raise RuntimeError(f"the trainer does one thing at a time and is busy with {self._trainer}")
        if self.is_done:
            return Wait("batch_done")
        batch = self._book.batches.get(self.batch)
        if batch is None:
            return Wait("prompts")
        is_last = self._book.is_last(batch)
        if size := self._book.fragment_size(batch):
            fragment = Fragment(self._num_fragments, batch.number, self._book.take_ready(batch, size))
            self._num_fragments += 1
            batch.counts.num_fragments += 1
            self._occupy(fragment, now_s)
            return fragment
        if is_last:
            self._foresight.on_end(now_s)
            searches, error = self._foresight.num_searches, self._foresight.prediction_error
            report = batch.report(self.rules.group_size, num_searches=searches, prediction_error=error)
            self._occupy(report, now_s)
            return report
        return self._at_bubble(batch, now_s)

    def on_trained(self, fragment_id: int, now_s: float) -> None:
        """A training call has ended."""
        fragment = self._trainer
        if not isinstance(fragment, Fragment) or fragment.id != fragment_id:
            raise RuntimeError(f"fragment {fragment_id} ended, but the trainer is busy with {fragment}")
        self._trainer = None
        took_s = now_s - self._trainer_since_s
        self._book.headstart.on_worked(took_s, self._slots.ids, self._durations)
        self._book.mark_trained(self._book.batches[fragment.batch], fragment.uids)
        self._durations.on_trained(len(fragment.uids), took_s)

    def on_committed(self, number: int) -> None:
        """The optimizer step of batch `number` is done: the trainer has version `number` + 1."""
        report = self._trainer
        if not isinstance(report, BatchReport) or report.batch != number:
            raise RuntimeError(f"batch {number} was committed, but the trainer is busy with {report}")
        self._trainer = None
        self._book.close(number)
        self._book.headstart.on_next_batch()
        self.batch += 1
        self._foresight.on_next_batch()
        self._disturb()

    def _occupy(self, task: Fragment | Assist | BatchReport, now_s: float) -> None:
        self._trainer = task
        self._trainer_since_s = now_s
        self._disturb()

    # -- bubbles --------------------------------------------------------------------------------------------
    def _disturb(self) -> None:
        """Ask the search again: its last prediction may no longer hold."""
        self._wait_until_s = None

    def _at_bubble(self, batch: Batch, now_s: float) -> Assist | Wait:
        # without a slot no replica encodes prompts for the trainer, and the caller waits for one that is started
        if self.rules.tag.policy == "off" or not self._slots or self._book.oldest_on_policy(self.batch) is None:
            has_unissued = self._book.has_unissued(batch.number)
            return Wait(idle_reason(batch, has_slots=bool(self._slots), has_unissued=has_unissued))
        smallest = self.rules.assist_sizes(len(self._slots))[0]
        if self.rules.tag.policy == "always":
            return self._assist(smallest, now_s, "always", None)
        if self._wait_until_s is not None and now_s < self._wait_until_s - EPSILON_S:
            return Wait("waiting_pays", self._wait_until_s - now_s)
        state = (batch, self._slots.ids, self._requests.values(), self._book.live)
        bubble = bubble_at(now_s, *state, self._durations, self.rules)
        if bubble is None:
            return Wait("costs_unknown")
        if self._durations.assist_s() is None:
            return self._assist(smallest, now_s, "measure", None)
        verdict = decide(bubble)
        self._foresight.on_verdict(verdict, now_s)
        counts = self._foresight.counts(verdict)
        if verdict.num_samples and counts:
            return self._assist(verdict.num_samples, now_s, "gain", verdict.gain_s)
        self._wait_until_s = now_s + verdict.wait_until_s
        return Wait("waiting_pays" if counts else "gain_in_doubt", verdict.wait_until_s)

    def _assist(self, size: int, now_s: float, reason: AssistReason, predicted_gain_s: float | None) -> Assist:
        """Issue `size` samples, or all that are left, of the oldest groups that the trainer may generate."""
        chunks = self._book.issue_on_policy(self.batch, size)
        for chunk in chunks:
            self._send(chunk, TRAINER, now_s)
        assist = Assist(chunks, reason, predicted_gain_s)
        batch = self._book.batches[self.batch]
        batch.counts.num_assists += 1
        batch.counts.num_assisted += assist.num_samples
        self._assisting = {chunk.id for chunk in chunks}
        self._occupy(assist, now_s)
        return assist
