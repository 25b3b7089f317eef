# SPDX-License-Identifier: Apache-2.0
"""The planner under random event orders: slots of any speed that fail, die and join."""

import random
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest

from tests.schedulers.flat import changed, make_rules
from verl_digen.schedulers.durations import MeasuredDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.types import Assist, BatchReport, Chunk, Fragment, Generate, LoadWeights, Wait

NUM_WORLDS = 400


@dataclass
class World:
    """Execute a planner's decisions with random durations, and record the events."""

    rules: BatchRules
    seed: int
    num_slots: int = 3
    num_batches: int = 4
    failure_rate: float = 0.0
    loss_rate: float = 0.0
    """Chance that a slot dies while it generates a chunk; another one joins later."""
    zero_spread_rate: float = 0.0
    wrong_version_rate: float = 0.0
    issued: list[tuple[str, Chunk]] = field(default_factory=list)
    """(generator, chunk), in the order of issue."""
    trained: list[Fragment] = field(default_factory=list)
    reports: dict[int, object] = field(default_factory=dict)
    drawn: Counter = field(default_factory=Counter)
    """Batch -> number of prompts drawn."""
    waits: Counter = field(default_factory=Counter)

    def run(self) -> "World":
        self.rng = random.Random(self.seed)
        self.durations = MeasuredDurations()
        self.planner = BatchPlanner(self.rules, self.durations, first_batch=0, num_batches=self.num_batches)
        self.due, self.count, self.now_s = [], 0, 0.0
        self.trainer_busy = False
        self.assisting: set[int] = set()
        self.scored: set[tuple[str, int]] = set()
        self.draws = 0
        self.spread_of: dict[str, bool] = {}
        for index in range(self.num_slots):
            self.planner.on_slot_joined(f"s{index}", replica=f"r{index // 2}", version=0)
        for _ in range(100_000):
            if self.planner.is_done:
                return self
            self._step()
        raise AssertionError(f"the run does not end: {self}")

    def _later(self, mean_s: float, what, *args) -> None:
        self.count += 1
        heappush(self.due, (self.now_s + self.rng.uniform(0.2, 1.8) * mean_s, self.count, what, args))

    def _step(self) -> None:
        planner = self.planner
        for batch, count in planner.prompts_wanted().items():
            uids = [f"p{self.draws + index}" for index in range(count)]
            self.draws += count
            self.drawn[batch] += count
            for uid in uids:
                self.spread_of[uid] = self.rng.random() >= self.zero_spread_rate
            planner.on_prompts(batch, uids)
        for decision in planner.assign(self.now_s):
            if isinstance(decision, Generate):
                self._check_order(decision.slot, decision.chunk)
                self._generate(decision.slot, decision.chunk, mean_s=1.0)
            else:
                assert isinstance(decision, LoadWeights)
                self._later(0.1, self.planner.on_loaded, decision.slot, decision.version)
        for chunk_id in planner.take_cancelled():
            if self.rng.random() < 0.5:  # aborted; else it runs to its end
                self._later(0.0, self._generated, chunk_id)
        if not self.trainer_busy:
            self._ask_trainer()
        self.now_s, _, what, args = heappop(self.due)
        what(*args)

    def _ask_trainer(self) -> None:
        decision = self.planner.next_for_trainer(self.now_s)
        self.trainer_busy = not isinstance(decision, Wait)
        if isinstance(decision, Wait):
            self.waits[decision.reason] += 1
            if not self.due:
                raise AssertionError(f"nobody has anything to do: {decision}")
        elif isinstance(decision, Fragment):
            self.trained.append(decision)
            self._later(0.3, self._trained, decision)
        elif isinstance(decision, Assist):
            assert not self.rules.gap.enable or not self.planner._book.batches[self.planner.batch].ready
            assert not self.assisting, "two assists at once"
            assert 1 <= decision.num_samples <= self.rules.assist_sizes(self.num_slots)[-1] or self.loss_rate
            num_groups = len({chunk.uid for chunk in decision.chunks})
            assert num_groups == len(decision.chunks) and self.rules.assist_spans_groups >= (num_groups > 1)
            assert {(chunk.batch, chunk.version) for chunk in decision.chunks} == {(self.planner.batch,) * 2}
            self.assisting = {chunk.id for chunk in decision.chunks}
            for chunk in decision.chunks:
                self._generate("trainer", chunk, mean_s=1.5)
        else:
            assert isinstance(decision, BatchReport)
            self.reports[decision.batch] = decision
            self._later(0.2, self._committed, decision.batch)

    # -- executing decisions --------------------------------------------------------------------------------
    def _generate(self, who: str, chunk: Chunk, mean_s: float) -> None:
        self.issued.append((who, chunk))
        if who != "trainer" and self.rng.random() < self.loss_rate:
            self._later(mean_s / 2, self._die, who, chunk)
            return
        failed = [index for index in chunk.samples if self.rng.random() < self.failure_rate]
        for index in chunk.samples:  # scores come one by one, before or after the end of the request
            if index not in failed:
                self._later(mean_s * 1.2, self._scored_one, chunk, index)
        if failed:
            self._later(mean_s, self.planner.on_failed, chunk.id, failed)
        self._later(mean_s, self._generated, chunk.id)

    def _generated(self, chunk_id: int) -> None:
        if chunk_id in self.assisting:
            self.assisting.discard(chunk_id)
            self.trainer_busy = bool(self.assisting)
        self.planner.on_generated(chunk_id, self.now_s)

    def _scored_one(self, chunk: Chunk, index: int) -> None:
        version = chunk.version
        if self.rng.random() < self.wrong_version_rate:
            version -= 1
        group = self.planner._book.groups.get(chunk.uid)
        is_wanted = chunk.id in self.planner._book.live
        if is_wanted and version == chunk.version:
            assert group is not None and group.version == version
            self.scored.add((chunk.uid, index))
        reward = self.rng.random() if self.spread_of[chunk.uid] else 0.5
        self.planner.on_scored(chunk.id, {index: reward}, version, self.now_s)

    def _die(self, slot: str, chunk: Chunk) -> None:
        if chunk.id not in self.planner._requests:  # cancelled and aborted before
            return
        self.planner.on_slot_lost(slot)
        self._later(2.0, self._join, f"{slot}'")
        for index in chunk.samples:  # samples believed lost may still arrive
            if self.rng.random() < 0.3:
                self._later(1.0, self._late, chunk, index)
        self._later(1.0, self._generated, chunk.id)

    def _late(self, chunk: Chunk, index: int) -> None:
        self.planner.on_scored(chunk.id, {index: 0.3}, chunk.version, self.now_s)

    def _join(self, slot: str) -> None:
        version = self.rng.randint(max(0, self.planner.published - 1), self.planner.published)
        self.planner.on_slot_joined(slot, replica=slot, version=version)

    def _trained(self, fragment: Fragment) -> None:
        self.trainer_busy = False
        self.planner.on_trained(fragment.id, self.now_s)

    def _committed(self, batch: int) -> None:
        self.trainer_busy = False
        self.planner.on_committed(batch)
        self._later(0.1, self.planner.on_published, batch + 1)

    # -- invariants -----------------------------------------------------------------------------------------
    def _check_order(self, slot: str, chunk: Chunk) -> None:
        """GAP: no older group that this version may take has samples left."""
        group = self.planner._book.groups[chunk.uid]
        for other in self.planner._book.groups.values():
            if other.place < group.place and other.unissued and other.state == "open":
                can_take = other.version == chunk.version or (
                    other.version is None and other.batch == chunk.version == self.planner.published
                )
                assert not can_take, f"{chunk} was issued before {other}"


def assert_invariants(world: World) -> None:
    """Check the invariants at the end of a run, from the recorded events."""
    rules, planner = world.rules, world.planner
    # every batch is committed once, and its counts add up
    assert sorted(world.reports) == list(range(world.num_batches))
    trained = Counter(uid for fragment in world.trained for uid in fragment.uids)
    assert set(trained.values()) <= {1}, "a group was trained twice"
    for number, report in world.reports.items():
        fragments = [fragment for fragment in world.trained if fragment.batch == number]
        assert report.num_groups == sum(len(fragment.uids) for fragment in fragments)
        assert report.num_samples == report.num_groups * rules.group_size
        assert report.num_fragments == len(fragments)
        assert report.num_groups + sum(report.dropped.values()) == world.drawn[number], "trained + dropped = drawn"
        assert report.num_groups <= rules.num_prompts
        assert sum(report.stale_groups.values()) == report.num_groups
        assert report.num_sample_refills <= rules.max_sample_refills
        assert report.num_group_refills <= rules.max_group_refills
        short = rules.num_prompts - report.num_groups
        assert short == 0 or report.num_group_refills == rules.max_group_refills, "short although it could refill"
        for age in range(1, rules.staleness.max_versions + 2):
            older = sum(count for other, count in report.stale_groups.items() if other >= age)
            assert older <= rules.stale_allowance(age)
        assert max(report.stale_groups, default=0) <= rules.staleness.max_versions
        for fragment in fragments:
            assert len(fragment.uids) <= (rules.largest_fragment if rules.gap.enable else rules.num_prompts)
        if not rules.gap.enable:
            assert len(fragments) <= 1
    # a group is trained whole, under one version; a sample is reissued only as often as it was given back
    by_group: dict[str, list[Chunk]] = {}
    for _, chunk in world.issued:
        by_group.setdefault(chunk.uid, []).append(chunk)
        assert chunk.samples and len(set(chunk.samples)) == len(chunk.samples)
    ids = [chunk.id for _, chunk in world.issued]
    assert ids == sorted(set(ids))
    for uid in trained:
        chunks = by_group[uid]
        assert {index for chunk in chunks for index in chunk.samples} == set(range(rules.group_size))
        assert all((uid, index) in world.scored for index in range(rules.group_size))
    issued = Counter((chunk.uid, index) for _, chunk in world.issued for index in chunk.samples)
    again = sum(count - 1 for count in issued.values())
    counted = sum(report.num_sample_refills + report.num_reissued for report in world.reports.values())
    assert again <= counted, "a sample was generated again, and not counted"
    if not (world.failure_rate or world.loss_rate or world.wrong_version_rate or rules.staleness.max_versions):
        assert again == 0
    # nothing is left behind
    assert not planner._book.groups and not planner._book.batches
    assert not planner._book.live


def random_world(seed: int) -> World:
    rng = random.Random(seed)
    rules = make_rules(
        num_prompts=rng.randint(1, 6),
        group_size=rng.randint(1, 6),
        is_pipelined=rng.random() < 0.8,
        chunk_size=rng.choice([None, 1, 2, 4]),
        max_chunk_size=rng.choice([1, 2, 8]),
        replicate_prompts=rng.random() < 0.8,
        max_groups_per_fragment=rng.randint(1, 4),
        assist=rng.choice(["off", "bts", "always"]),
        num_trainer_ranks=rng.choice([1, 1, 4, 9]),
        assist_chunk_size=rng.choice([None, None, 1, 3]),
        assist_spans_groups=rng.random() < 0.8,
        max_versions=rng.choice([0, 0, 1, 2]),
        fraction=rng.choice([0.3, 0.5, 1.0]),
        extra_prompts=rng.choice([0, 0, 2]),
        drop_zero_spread=rng.random() < 0.4,
        max_group_refills=rng.choice([0, 2, 50]),
        max_sample_refills=rng.choice([0, 3, 50]),
    )
    return World(
        rules,
        seed,
        num_slots=rng.randint(1, 6),
        failure_rate=rng.choice([0.0, 0.1]),
        loss_rate=rng.choice([0.0, 0.1]),
        zero_spread_rate=rng.choice([0.0, 0.3]),
        wrong_version_rate=0.05 if rules.staleness.max_versions and rng.random() < 0.3 else 0.0,
    )


@pytest.mark.parametrize("first", range(0, NUM_WORLDS, 50))
def test_invariants_hold_in_random_worlds(first):
    seen: Counter = Counter()
    for seed in range(first, first + 50):
        world = random_world(seed).run()
        assert_invariants(world)
        for report in world.reports.values():
            seen.update(report.dropped)
            seen.update(
                assisted=report.num_assisted,
                reissued=report.num_reissued,
                stale=sum(count for age, count in report.stale_groups.items() if age),
                refilled=report.num_group_refills + report.num_sample_refills,
            )
    wanted = ("failed", "zero_spread", "assisted", "reissued", "stale", "refilled")
    missing = [what for what in wanted if not seen[what]]
    assert not missing, "the worlds are too kind to test anything"


STRICT = make_rules(num_prompts=4, group_size=4)


def test_runs_are_deterministic():
    first, second = random_world(5).run(), random_world(5).run()
    assert (first.issued, first.trained, first.reports) == (second.issued, second.trained, second.reports)


def test_tcss_begins_at_most_the_allowed_fraction_early_and_does_begin():
    world = World(changed(STRICT, num_prompts=10, max_versions=1, fraction=0.3), seed=1, num_slots=8).run()
    stale = [report.stale_groups.get(1, 0) for report in world.reports.values()]
    assert stale[0] == 0
    assert max(stale[1:]) == 3


@pytest.mark.parametrize(
    ("max_versions", "fraction", "allowed"),
    [(0, 1.0, [10, 0, 0]), (1, 0.25, [10, 2, 0]), (1, 1.0, [10, 10, 0]), (2, 0.3, [10, 10, 3]), (3, 1.0, [10, 10, 10])],
)
def test_one_admission_rule_covers_strict_fractional_and_larger_asynchrony(max_versions, fraction, allowed):
    rules = changed(STRICT, num_prompts=10, max_versions=max_versions, fraction=fraction)
    assert [rules.stale_allowance(age) for age in (0, 1, 2)] == allowed


def planner_with(rules: BatchRules, *slots: str, num_batches: int = 2) -> BatchPlanner:
    planner = BatchPlanner(rules, MeasuredDurations(), first_batch=0, num_batches=num_batches)
    for slot in slots:
        planner.on_slot_joined(slot, replica=slot, version=0)
    draw(planner)
    return planner


def draw(planner: BatchPlanner) -> None:
    for batch, count in planner.prompts_wanted().items():
        first = planner._book._num_groups
        planner.on_prompts(batch, [f"p{first + index}" for index in range(count)])


def finish(planner: BatchPlanner, chunk: Chunk, now_s: float = 1.0, rewards: dict[int, float] | None = None) -> None:
    planner.on_generated(chunk.id, now_s)
    scores = {index: float(index) for index in chunk.samples} if rewards is None else rewards
    planner.on_scored(chunk.id, scores, chunk.version, now_s)


def publish_first(planner: BatchPlanner) -> None:
    """Train and commit the first batch, in one fragment, and publish its weights."""
    planner.next_for_trainer(1.0)
    planner.on_trained(0, 2.0)
    planner.next_for_trainer(2.0)
    planner.on_committed(0)
    planner.on_published(1)


def chunks_of(decisions) -> list[Chunk]:
    return [decision.chunk for decision in decisions if isinstance(decision, Generate)]


def test_gap_spreads_one_group_over_all_slots_before_the_next():
    planner = planner_with(STRICT, "a", "b")
    first = chunks_of(planner.assign(0.0))
    assert [(chunk.uid, chunk.samples) for chunk in first] == [("p0", (0, 1)), ("p0", (2, 3))]
    for chunk in first:
        finish(planner, chunk)
    assert [chunk.uid for chunk in chunks_of(planner.assign(1.0))] == ["p1", "p1"]
    assert planner.next_for_trainer(1.0) == Fragment(0, 0, ("p0",))


def test_a_group_goes_to_one_slot_whole_without_prompt_replication():
    planner = planner_with(changed(STRICT, replicate_prompts=False, chunk_size=1), "a", "b")
    assert [(chunk.uid, len(chunk.samples)) for chunk in chunks_of(planner.assign(0.0))] == [("p0", 4), ("p1", 4)]


def test_groups_that_pile_up_merge_into_one_fragment_up_to_the_bound():
    planner = planner_with(changed(STRICT, replicate_prompts=False, max_groups_per_fragment=2), *"abcd")
    for chunk in reversed(chunks_of(planner.assign(0.0))):
        finish(planner, chunk)
    assert planner.next_for_trainer(1.0) == Fragment(0, 0, ("p0", "p1"))
    planner.on_trained(0, 2.0)
    assert planner.next_for_trainer(2.0) == Fragment(1, 0, ("p2", "p3"))
    planner.on_trained(1, 3.0)
    report = planner.next_for_trainer(3.0)
    assert isinstance(report, BatchReport)
    assert (report.num_groups, report.num_samples, report.num_fragments) == (4, 16, 2)


def test_a_lost_slots_chunk_is_issued_again_once_and_its_late_scores_are_ignored():
    planner = planner_with(changed(STRICT, num_prompts=1), "a", "b")
    lost, other = chunks_of(planner.assign(0.0))
    planner.on_slot_lost("a")
    finish(planner, other)
    (again,) = chunks_of(planner.assign(1.0))
    assert (again.uid, again.samples, again.id) == (lost.uid, lost.samples, 2)
    planner.on_generated(lost.id, 1.5)
    planner.on_scored(lost.id, {0: 9.0, 1: 9.0}, 0, 1.5)
    assert planner.next_for_trainer(1.5) == Wait("no_fragment_ready")
    finish(planner, again, 2.0)
    assert planner.next_for_trainer(2.0) == Fragment(0, 0, ("p0",))
    planner.on_trained(0, 3.0)
    report = planner.next_for_trainer(3.0)
    assert (report.num_reissued, report.num_late) == (2, 2)


def test_a_replacement_prompt_comes_before_the_next_batch():
    rules = changed(STRICT, num_prompts=1, max_versions=1, drop_zero_spread=True, max_group_refills=1)
    planner = planner_with(rules, "a", num_batches=3)
    (chunk,) = chunks_of(planner.assign(0.0))
    finish(planner, chunk, rewards=dict.fromkeys(range(4), 0.5))
    draw(planner)
    assert [(chunk.batch, chunk.uid) for chunk in chunks_of(planner.assign(1.0))] == [(0, "p2")]


def test_a_reward_that_is_no_number_is_an_error():
    planner = planner_with(STRICT, "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    with pytest.raises(RuntimeError, match="a reward must be finite, got nan for sample 0 of group p0"):
        planner.on_scored(chunk.id, {0: float("nan")}, 0, 1.0)


def test_a_failed_sample_is_refilled_within_the_bound_and_then_its_group_is_dropped_and_counted():
    planner = planner_with(changed(STRICT, num_prompts=1, max_sample_refills=1), "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    planner.on_failed(chunk.id, [2])
    finish(planner, chunk, rewards={0: 0.0, 1: 1.0, 3: 3.0})
    (again,) = chunks_of(planner.assign(1.0))
    assert (again.uid, again.samples, again.version) == ("p0", (2,), 0)
    planner.on_failed(again.id, [2])
    planner.on_generated(again.id, 2.0)
    report = planner.next_for_trainer(2.0)
    assert (report.num_groups, report.num_sample_refills, report.dropped) == (0, 1, {"failed": 1})


def test_a_group_without_spread_is_dropped_and_refilled_within_the_bound():
    rules = changed(STRICT, num_prompts=1, drop_zero_spread=True, max_group_refills=1)
    planner = planner_with(rules, "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    finish(planner, chunk, rewards=dict.fromkeys(range(4), 0.5))
    assert planner.next_for_trainer(1.0) == Wait("prompts")
    assert planner.prompts_wanted() == {0: 1}
    draw(planner)
    (chunk,) = chunks_of(planner.assign(1.0))
    finish(planner, chunk, 2.0, rewards=dict.fromkeys(range(4), 0.5))
    assert planner.prompts_wanted() == {}
    report = planner.next_for_trainer(2.0)
    assert (report.num_groups, report.num_group_refills, report.dropped) == (0, 1, {"zero_spread": 2})


def test_a_surplus_chunk_that_is_generated_is_void_too_its_scores_may_wait_for_samples_that_are_never_issued():
    planner = planner_with(changed(STRICT, num_prompts=1, extra_prompts=1, chunk_size=2), *"abc")
    first, second, waiting = chunks_of(planner.assign(0.0))
    assert [first.uid, second.uid, waiting.uid] == ["p0", "p0", "p1"]
    planner.on_generated(waiting.id, 1.0)
    for chunk in (first, second):
        finish(planner, chunk, 2.0)
    assert planner.take_cancelled() == [waiting.id] and planner.take_cancelled() == []


def test_a_batch_is_full_with_p_groups_and_the_surplus_is_cancelled():
    planner = planner_with(changed(STRICT, num_prompts=2, extra_prompts=1, replicate_prompts=False), *"abc")
    chunks = chunks_of(planner.assign(0.0))
    assert [chunk.uid for chunk in chunks] == ["p0", "p1", "p2"]
    finish(planner, chunks[2])
    finish(planner, chunks[0])
    assert planner.take_cancelled() == [chunks[1].id]
    assert planner.next_for_trainer(1.0) == Fragment(0, 0, ("p0", "p2"))
    planner.on_trained(0, 2.0)
    assert planner.next_for_trainer(2.0).dropped == {"surplus": 1}


def test_the_end_of_a_cancelled_chunk_says_nothing_about_the_speed_of_its_slot():
    planner = planner_with(changed(STRICT, num_prompts=1, extra_prompts=1, replicate_prompts=False), "a", "b")
    wanted, surplus = chunks_of(planner.assign(0.0))
    finish(planner, wanted, 8.0)
    assert planner.take_cancelled() == [surplus.id]
    planner.on_generated(surplus.id, 9.0)
    assert [planner._durations.generate_sample_s(slot) for slot in "ab"] == [2.0, 2.0]


def test_an_old_slot_finishes_the_groups_of_its_version_before_it_loads_the_new_one():
    planner = planner_with(changed(STRICT, num_prompts=1, max_versions=1, chunk_size=1), "a", "b")
    for _ in range(2):
        for chunk in chunks_of(planner.assign(0.0)):
            finish(planner, chunk)
    early = chunks_of(planner.assign(1.0))  # of batch 1, under version 0
    assert [(chunk.batch, chunk.version, chunk.samples) for chunk in early] == [(1, 0, (0,)), (1, 0, (1,))]
    publish_first(planner)
    finish(planner, early[0], 3.0)
    (third,) = chunks_of(planner.assign(3.0))
    assert (third.samples, third.version) == ((2,), 0)
    finish(planner, early[1], 4.0)
    (fourth,) = chunks_of(planner.assign(4.0))
    assert (fourth.samples, fourth.version) == ((3,), 0)
    finish(planner, third, 5.0)
    assert planner.assign(5.0) == [LoadWeights("a", 1)]
    finish(planner, fourth, 5.0)
    assert planner.assign(5.0) == [LoadWeights("b", 1)]
    assert planner.next_for_trainer(5.0) == Fragment(1, 1, ("p1",))


def test_a_slot_loads_the_newest_weights_before_it_begins_a_group():
    planner = planner_with(changed(STRICT, num_prompts=2, max_versions=1), "a")
    for _ in range(2):
        (chunk,) = chunks_of(planner.assign(0.0))
        finish(planner, chunk)
    (early,) = chunks_of(planner.assign(1.0))
    assert (early.uid, early.batch, early.version) == ("p2", 1, 0)
    publish_first(planner)
    finish(planner, early, 3.0)
    assert planner.assign(3.0) == [LoadWeights("a", 1)], "although another group of batch 1 may be begun under 0"
    planner.on_loaded("a", 1)
    (chunk,) = chunks_of(planner.assign(3.0))
    assert (chunk.uid, chunk.version) == ("p3", 1)


def test_a_group_whose_version_no_slot_has_any_more_starts_over_under_the_new_one():
    planner = planner_with(changed(STRICT, num_prompts=1, max_versions=1), "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    finish(planner, chunk)
    (early,) = chunks_of(planner.assign(1.0))
    assert (early.uid, early.version) == ("p1", 0)
    publish_first(planner)
    planner.on_slot_lost("a")
    planner.on_slot_joined("b", replica="b", version=1)
    (again,) = chunks_of(planner.assign(3.0))
    assert (again.uid, again.samples, again.version) == ("p1", (0, 1, 2, 3), 1)
    finish(planner, again, 4.0)
    planner.next_for_trainer(4.0)
    planner.on_trained(1, 5.0)
    assert planner.next_for_trainer(5.0).stale_groups == {0: 1}


def test_a_sample_of_another_version_is_an_error_in_strict_mode_and_fails_otherwise():
    planner = planner_with(STRICT, "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    with pytest.raises(RuntimeError, match=r"must be generated under version 0, got 1.*max_versions=0"):
        planner.on_scored(chunk.id, {0: 1.0}, 1, 1.0)
    planner = planner_with(changed(STRICT, max_versions=1, max_sample_refills=9), "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    planner.on_scored(chunk.id, {0: 1.0}, 1, 1.0)
    finish(planner, chunk, rewards={1: 1.0, 2: 2.0, 3: 3.0})
    assert chunks_of(planner.assign(1.0))[0].samples == (0,)


def test_the_trainer_assists_once_to_learn_its_cost_and_never_before_the_others_are_known():
    rules = changed(STRICT, num_prompts=8, group_size=1, assist="bts", chunk_size=1)
    planner = planner_with(rules, "a")
    (chunk,) = chunks_of(planner.assign(0.0))
    assert planner.next_for_trainer(0.0) == Wait("costs_unknown")
    finish(planner, chunk, 1.0)
    (second,) = chunks_of(planner.assign(1.0))
    planner.next_for_trainer(1.0)
    planner.on_trained(0, 1.1)
    decision = planner.next_for_trainer(1.1)
    assert isinstance(decision, Assist) and (decision.reason, decision.chunks[0].uid) == ("measure", "p2")
    finish(planner, second, 2.0)
    planner.assign(2.0)
    finish(planner, decision.chunks[0], 2.3)
    planner.next_for_trainer(2.3)
    planner.on_trained(1, 2.5)
    decision = planner.next_for_trainer(2.5)
    assert isinstance(decision, Assist) and decision.reason == "gain"
    assert decision.predicted_gain_s is not None and decision.predicted_gain_s > 0


def test_a_bubble_says_why_nobody_can_work():
    planner = BatchPlanner(STRICT, MeasuredDurations(), first_batch=0, num_batches=1)
    assert planner.next_for_trainer(0.0) == Wait("prompts")
    draw(planner)
    assert planner.next_for_trainer(0.0) == Wait("no_slots")
    planner.on_slot_joined("a", replica="a", version=0)
    for _ in range(4):
        (chunk,) = chunks_of(planner.assign(0.0))
        assert planner.next_for_trainer(0.0) == Wait("no_fragment_ready")
        planner.on_generated(chunk.id, 1.0)
    assert planner.next_for_trainer(1.0) == Wait("scoring")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda planner: planner.on_trained(0, 1.0), "fragment 0 ended, but the trainer is busy with None"),
        (lambda planner: planner.on_committed(0), "batch 0 was committed, but the trainer is busy with None"),
        (lambda planner: planner.on_published(1), r"must lie in \[0, 0\], got 1"),
        (lambda planner: planner.on_loaded("a", 1), "loads weights after `unload`"),
        (lambda planner: planner.on_slot_joined("a", replica="a", version=0), "joins once"),
        (lambda planner: planner.on_slot_joined("b", replica="b", version=3), "published versions"),
        (lambda planner: planner.on_prompts(0, ["p9"]), "drawn as wanted"),
    ],
)
def test_a_broken_contract_is_told(call, message):
    planner = planner_with(STRICT, "a")
    with pytest.raises(RuntimeError, match=message):
        call(planner)


@pytest.mark.parametrize(
    ("group_size", "num_ranks", "num_slots", "sizes"),
    [
        (24, 24, 8, (24, 48, 96, 192)),  # a slot's chunk is 3: every rank of the trainer gets a sample, or 2, 4, 8
        (12, 24, 8, (24, 48, 96)),  # of two groups; 192 samples are more than the batch
        (12, 1, 2, (6,)),  # one rank takes as many samples as one slot
        (12, 5, 2, (5, 10, 20, 40)),  # a slot's chunk of 6 would leave four ranks idle in the second round
        (12, 704, 320, (96,)),  # the whole batch
    ],
)
def test_an_assist_of_default_size_gives_every_rank_as_many_samples(group_size, num_ranks, num_slots, sizes):
    rules = make_rules(num_prompts=8, group_size=group_size, num_trainer_ranks=num_ranks, max_chunk_size=8)
    assert rules.assist_sizes(num_slots) == sizes
    of_one_group = changed(rules, assist_spans_groups=False).assist_sizes(num_slots)
    assert of_one_group[0] == min(sizes[0], group_size) and max(of_one_group) <= group_size
    assert changed(rules, assist_chunk_size=3).assist_sizes(num_slots) == (3,)
    assert changed(rules, assist_chunk_size=1000).assist_sizes(num_slots) == (8 * group_size,)
    assert [rules.assist_rounds(count * num_ranks + 1) for count in (0, 1, 2)] == [1, 2, 3]


@pytest.mark.parametrize(
    ("group_size", "num_replicas", "slots_per_replica", "size"),
    [(16, 8, 1, 2), (16, 8, 2, 2), (16, 8, 4, 2), (16, 3, 2, 6), (16, 1, 2, 8), (4, 8, 2, 1)],
)
def test_further_slots_of_a_replica_hold_the_next_groups(group_size, num_replicas, slots_per_replica, size):
    rules = make_rules(num_prompts=8, group_size=group_size, max_chunk_size=8, slots_per_replica=slots_per_replica)
    assert rules.slot_chunk_size(num_replicas * slots_per_replica) == size
    planner = BatchPlanner(rules, MeasuredDurations(), first_batch=0, num_batches=1)
    for replica in range(num_replicas):
        for slot in range(slots_per_replica):
            planner.on_slot_joined(f"{replica}/{slot}", replica=str(replica), version=0)
    planner.on_prompts(0, [f"p{number}" for number in range(8)])
    chunks = [decision.chunk for decision in planner.assign(0.0)]
    assert len(chunks) == num_replicas * slots_per_replica
    first_of_each = chunks[:num_replicas]
    groups = -(-num_replicas * size // group_size)
    assert {chunk.uid for chunk in first_of_each} <= {f"p{number}" for number in range(groups)}


def test_an_assist_has_a_chunk_of_each_of_the_oldest_groups_and_the_trainer_is_free_with_the_last():
    rules = changed(STRICT, assist="always", num_trainer_ranks=7, max_sample_refills=2)
    planner = planner_with(rules, "a")
    (slots,) = chunks_of(planner.assign(0.0))
    assert (slots.uid, slots.samples) == ("p0", (0, 1, 2, 3))
    assist = planner.next_for_trainer(0.0)
    assert isinstance(assist, Assist) and assist.num_samples == 7
    assert [(chunk.uid, chunk.samples) for chunk in assist.chunks] == [("p1", (0, 1, 2, 3)), ("p2", (0, 1, 2))]
    first, second = assist.chunks
    planner.on_failed(second.id, [1])
    planner.on_generated(first.id, 5.0)
    with pytest.raises(RuntimeError, match="the trainer does one thing at a time"):
        planner.next_for_trainer(5.0)
    planner.on_generated(second.id, 5.0)
    planner.on_scored(first.id, dict.fromkeys(first.samples, 1.0), 0, 5.1)
    planner.on_scored(second.id, {0: 1.0, 2: 2.0}, 0, 5.1)
    assert planner.next_for_trainer(5.1) == Fragment(0, 0, ("p1",))
    planner.on_generated(slots.id, 6.0)
    assert [(chunk.uid, chunk.samples) for chunk in chunks_of(planner.assign(6.0))] == [("p2", (1, 3))]


def test_a_group_that_is_dropped_in_the_middle_of_an_assist_leaves_its_others():
    rules = changed(STRICT, num_prompts=2, assist="always", num_trainer_ranks=8)
    planner = planner_with(rules, "a")
    assist = planner.next_for_trainer(0.0)
    assert isinstance(assist, Assist)
    lost, kept = assist.chunks
    planner.on_failed(lost.id, [0])  # no refill is allowed: the group is dropped
    assert planner.take_cancelled() == [lost.id]
    for chunk in (lost, kept):
        finish(planner, chunk, 2.0)
    assert planner.next_for_trainer(2.0) == Fragment(0, 0, (kept.uid,))
    planner.on_trained(0, 3.0)
    report = planner.next_for_trainer(3.0)
    assert isinstance(report, BatchReport)
    assert (report.num_assists, report.num_assisted, report.num_late) == (1, 8, 4)
    assert (report.num_groups, report.dropped) == (1, {"failed": 1})
    assert planner._durations.assist_s() == pytest.approx((0.0, 2.0)), "one round of 8 ranks, whoever was dropped"
