# SPDX-License-Identifier: Apache-2.0
"""The conductor with the fake pools of `tests.trainer.conducted`."""

import asyncio
import random

import pytest

from tests.chaos.loop import run_in_virtual_time
from tests.tags import make_tag
from tests.trainer.conducted import GROUP_SIZE, SCORE_S, Pools, make_conductor, run
from verl_digen.agent_loop.chunks import GeneratedChunk, ScoredChunk
from verl_digen.errors import DeadlineMissed, RunStopped
from verl_digen.observe.timeline.interval import Lane
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.schedulers.types import Assist, BatchReport, Fragment, Wait
from verl_digen.store.keys import SampleName
from verl_digen.trainer.published import BatchOutcome, PublishedSamples
from verl_digen.trainer.timelines import Joining


def test_the_first_group_trains_while_later_ones_are_generated():
    pools = Pools()
    run(make_conductor(pools, num_prompts=8))
    order = [call[0] for call in pools.calls]
    first_training = order.index("accumulate")
    assert "generate" in order[first_training:], "generation went on"
    assert pools.calls[first_training][1] == ("p000",)
    assert "begin" in order[:2] and [name for name in order if name != "load"][-1] == "commit"


@pytest.mark.parametrize("seed", range(60))
def test_every_group_trains_once_whole_under_one_version_whatever_the_order_failures_and_lost_slots(seed):
    rng = random.Random(seed)
    fail = {(f"p{rng.randrange(6):03d}", rng.randrange(GROUP_SIZE)) for _ in range(rng.randrange(3))}
    pools = Pools(rng, fail, lose_slot_at=rng.choice([None, 3, 9]))
    conductor = make_conductor(pools, num_prompts=rng.randint(1, 4))
    outcomes = run(conductor, num_batches=3)
    assert len(pools.trained) == len(set(pools.trained))
    for number, outcome in enumerate(outcomes):
        assert outcome.report.num_groups == len(outcome.groups) == conductor.planner.rules.num_prompts
        for tags in outcome.groups.values():
            assert sorted(tags) == list(range(GROUP_SIZE))
            assert {tag.facts.version for tag in tags.values()} == {number}
    assert [call[0] for call in pools.calls].count("commit") == 3
    generated = [key for key in pools.generated if key[0] in pools.trained]
    assert len(generated) == len(set(generated)), "nothing that was trained was generated twice"


@pytest.mark.parametrize("seed", range(40))
def test_an_assist_of_several_groups_is_one_call_and_each_group_fails_by_itself(seed):
    rng = random.Random(seed)
    pools = Pools(rng, fail={("p001", 1), ("p002", 3)}, lose_slot_at=rng.choice([None, None, 5]))
    conductor = make_conductor(pools, num_prompts=4, assist="always", num_trainer_ranks=7)
    outcomes = run(conductor, num_batches=3)
    calls = [call[1:] for call in pools.calls if call[0] == "assist"]
    assert sum(outcome.report.num_assists for outcome in outcomes) == len(calls)
    assert sum(outcome.report.num_assisted for outcome in outcomes) == len(pools.assisted)
    sizes = [sum(len(samples) for _, samples in call) for call in calls]
    assert max(sizes) == 7 and max(map(len, calls)) >= 2
    assert all(len(dict(call)) == len(call) for call in calls), "one chunk of a group"
    assert len(pools.trained) == len(set(pools.trained)) == 12
    assert len(set(pools.generated)) == len(pools.generated), "no sample is generated twice"
    for outcome in outcomes:
        assert {f"conditions of {uid}" for uid in outcome.groups} <= outcome.published.condition_keys
    intervals = [one for one in conductor.recorder.drain() if one.kind == "assist"]
    assert [one.group_ids for one in intervals] == [tuple(dict(call)) for call in calls]
    assert [one.num_samples for one in intervals] == sizes and {one.lane.name for one in intervals} == {"trainer/0"}


def test_a_ready_fragment_goes_before_an_assist():
    pools = Pools()
    conductor = make_conductor(pools, num_prompts=6, assist="always", assist_chunk_size=1)
    decide, num_ready, decided = conductor.planner.next_for_trainer, [], []

    def watched(now_s):
        num_ready.append(len(conductor.planner._book.batches[0].ready))
        decided.append(decide(now_s))
        return decided[-1]

    conductor.planner.next_for_trainer = watched
    run(conductor)
    kinds = [*zip(map(type, decided), num_ready, strict=True)]
    assert {kind for kind, ready in kinds if ready} == {Fragment}
    assert {kind for kind, ready in kinds if not ready} == {Assist, Wait, BatchReport}


class Gated(Pools):
    """The calls of `gated` methods wait for `gate`."""

    def __init__(self, *gated, **kwargs):
        super().__init__(**kwargs)
        self.gate = asyncio.Event()
        for method in gated:
            setattr(self, method, self._behind_the_gate(getattr(self, method)))

    def _behind_the_gate(self, method):
        async def waits(*args):
            await self.gate.wait()
            return await method(*args)

        return waits

    def generated_chunks(self):
        return [call[2:] for call in self.calls if call[0] == "generate"]


async def spin():
    """Let everything happen that can happen without time passing."""
    for _ in range(200):
        await asyncio.sleep(0)


def batch_behind_a_gate(pools, **rules):
    """Run a batch whose gate opens when nothing else goes on -> (chunks begun before that, afterwards)."""

    async def batch():
        running = asyncio.ensure_future(make_conductor(pools, slots=("s0",), **rules).run_batch())
        await spin()
        begun = pools.generated_chunks()
        pools.gate.set()
        await running
        return begun, pools.generated_chunks()

    return asyncio.run(asyncio.wait_for(batch(), 60))


def test_a_free_slot_gets_its_next_chunk_while_the_last_one_is_scored():
    begun, all_chunks = batch_behind_a_gate(Gated("collect"), chunk_size=1)
    assert begun == all_chunks and len(begun) == 3 * GROUP_SIZE


def test_a_sample_that_could_not_be_scored_is_generated_again_while_the_trainer_trains():
    class FailsOnce(Gated):
        async def collect(self, chunk):
            scored = await super().collect(chunk)
            if chunk.uid == "p002" and len(self.generated_chunks()) == 3:
                return ScoredChunk({}, dict.fromkeys(chunk.samples, "no luck"))
            return scored

    begun, all_chunks = batch_behind_a_gate(
        FailsOnce("accumulate"), chunk_size=GROUP_SIZE, max_sample_refills=GROUP_SIZE
    )
    assert begun == all_chunks and [uid for uid, _ in begun] == ["p000", "p001", "p002", "p002"]


def drawn_prompts(conductor):
    """The batches that prompts are drawn for from now on."""
    draw, drawn = conductor.draw_prompts, []
    conductor.draw_prompts = lambda batch, count: drawn.append(batch) or draw(batch, count)
    return drawn


@pytest.mark.parametrize("max_versions", [0, 1])
async def test_the_next_batch_begins_with_its_weights_and_prompts_are_drawn_only_while_the_caller_waits(max_versions):
    pools = Pools()
    conductor = make_conductor(pools, max_versions=max_versions)
    drawn = drawn_prompts(conductor)
    await conductor.run_batch()
    await spin()
    assert drawn == list(range(1 + max_versions))
    assert len(pools.generated) == len(drawn) * 3 * GROUP_SIZE, "all of the next batch, if it may be stale"
    pools.staged = 1
    await conductor.publish(1)
    assert drawn == list(range(2 + max_versions))
    await spin()
    assert len(pools.generated) > 3 * GROUP_SIZE, "before the next `run_batch`"


async def test_a_drained_generator_begins_no_group():
    pools = Pools()
    conductor = make_conductor(pools)
    await conductor.run_batch()
    pools.staged = 1
    await conductor.publish(1)
    await conductor.drain()
    await spin()
    assert (len(pools.generated), set(pools.slot_versions.values())) == (3 * GROUP_SIZE, {1})


async def test_nothing_is_begun_after_a_run_has_failed():
    pools = Gated("generate", fail_accumulate_at=0)
    conductor = make_conductor(pools, slots=("s0", "s1"), chunk_size=1, num_prompts=8)
    pools.gate.set()
    with pytest.raises(FloatingPointError):
        await conductor.run_batch()
    begun = pools.generated_chunks()
    await spin()
    assert begun == pools.generated_chunks() and len(begun) < 8 * GROUP_SIZE


async def test_what_fails_between_two_batches_is_raised_when_the_next_weights_are_published():
    pools = Pools()
    conductor = make_conductor(pools, max_versions=1)
    await conductor.run_batch()

    async def collect(chunk):
        raise ConnectionError("the agent loop worker died")

    pools.collect = collect
    await spin()
    with pytest.raises(ConnectionError, match="worker died"):
        await conductor.publish(1)


def test_surplus_groups_are_withdrawn_and_are_no_failures(caplog):
    pools = Pools()
    pools.hangs_until_withdrawn = {"p001"}
    conductor = make_conductor(pools, num_prompts=3, extra_prompts=1, slots=("s0", "s1", "s2"))
    (outcome,) = run(conductor)
    assert list(outcome.groups) == ["p000", "p002", "p003"]
    assert outcome.report.dropped == {"surplus": 1}
    assert ("cancel", "p001") in pools.calls
    assert "failed" not in caplog.text


@pytest.mark.parametrize("generator", ["slot", "trainer"])
def test_the_scores_of_a_chunk_that_was_withdrawn_while_it_was_generated_are_cancelled_too(generator):
    pools, cancelled = Pools(), set()
    pools.hangs_until_withdrawn = {"p001"}

    async def cancel(chunk):
        if chunk.id in pools.done:  # it is generated, and its scores are under way
            cancelled.add(chunk.id)
        await Pools.cancel(pools, chunk)

    async def collect(chunk):
        for _ in range(100):
            if chunk.uid != "p001" or chunk.id in cancelled:
                return await Pools.collect(pools, chunk)
            await asyncio.sleep(0)
        raise AssertionError("a reward of groups waits for the samples that were withdrawn")

    pools.cancel, pools.collect = cancel, collect
    assist = "off" if generator == "slot" else "always"
    conductor = make_conductor(pools, num_prompts=3, extra_prompts=1, slots=("s0", "s1", "s2"), assist=assist)
    run(conductor, drains=True)
    assert any(call[0] == "assist" and call[1][0] == "p001" for call in pools.calls) == (generator == "trainer")
    assert cancelled and not conductor._chunks


def test_what_was_published_for_nothing_is_handed_out_to_be_cleared():
    pools = Pools()
    pools.fail = {("p001", 2)}
    conductor = make_conductor(pools, num_prompts=2, slots=("s0",), max_sample_refills=0)
    (outcome,) = run(conductor)
    assert list(outcome.groups) == ["p000", "p002"]
    assert outcome.published.condition_keys == {f"conditions of p00{number}" for number in range(3)}
    assert {(name.uid, name.sample_index, name.version) for name in outcome.unwanted} == {
        ("p001", index, 0) for index in (0, 1, 3)
    }


def test_the_first_row_of_a_sample_that_was_generated_again_is_to_be_cleared():
    published, tags = PublishedSamples(), [make_tag(uid="p000", sample_index=2, version=version) for version in (0, 1)]
    first, second = (SampleName.of(tag.facts) for tag in tags)
    for tag in tags:
        published.add(tag, is_wanted=True)
    outcome = BatchOutcome(BatchReport(0, uids=("p000",)), {}, 0.0, published)
    assert outcome.groups == {"p000": {2: tags[1]}} and outcome.unwanted == [first] != [second]


def test_samples_of_a_group_that_did_not_train_are_unwanted():
    published = PublishedSamples()
    for uid in ("p000", "p001"):
        published.add(make_tag(uid=uid), is_wanted=True)
    outcome = BatchOutcome(BatchReport(0, uids=("p000",)), {}, 0.0, published)
    assert [*outcome.groups] == ["p000"] and [name.uid for name in outcome.unwanted] == ["p001"]


def test_what_fails_before_the_batch_is_open_is_told_as_it_is():
    pools = Pools()

    async def begin():
        raise FloatingPointError("no memory")

    pools.begin = begin
    with pytest.raises(FloatingPointError, match="no memory"):
        run(make_conductor(pools))
    assert ("abort",) not in pools.calls


def test_what_fails_in_training_aborts_the_gradient_and_reaches_the_caller():
    pools = Pools(fail_accumulate_at=1)
    with pytest.raises(FloatingPointError, match="a kernel failed"):
        run(make_conductor(pools))
    assert pools.calls[-1] == ("abort",) and not pools.is_open and pools.version == 0


def test_a_batch_without_a_single_group_stops_the_run_and_says_why_once(caplog):
    pools = Pools(fail={(f"p{number:03d}", 0) for number in range(20)})
    pools.fail = AlwaysFails()
    with pytest.raises(RunStopped, match=r"every group was dropped .*no luck"):
        run(make_conductor(pools))
    assert pools.calls[-1] == ("abort",)
    assert len([text for text in caplog.messages if "no luck" in text]) == 1


class AlwaysFails(set):
    """A set that contains everything and never changes."""

    def __contains__(self, item):
        return True

    def __isub__(self, other):
        return self


async def test_a_batch_that_lost_every_slot_stays_open_and_goes_on_with_one_that_joins():
    pools = Pools(lose_slot_at=6)
    conductor = make_conductor(pools, slots=("s1",))
    assert await conductor.run_batch() is None and pools.is_open and not conductor._calls
    await conductor.publish(0, joining=[Joining("r2", None, Lane("generator", 0, "here", 1), ["s2"])])
    outcome = await conductor.run_batch()
    assert outcome.report.num_groups == 3 and pools.calls.count(("begin",)) == pools.calls.count(("commit",)) == 1
    assert len(pools.generated) == len(set(pools.generated)) == 3 * GROUP_SIZE


def test_the_timeline_shows_who_generated_trained_and_waited():
    conductor = make_conductor(Pools())
    run(conductor)
    intervals = conductor.recorder.drain()
    kinds = {(interval.lane.pool, interval.kind) for interval in intervals}
    assert kinds >= {
        ("generator", "generate"),
        ("generator", "wait"),
        ("reward", "score"),
        ("trainer", "train"),
        ("trainer", "wait"),
        ("trainer", "commit"),
    }
    assert sum(interval.num_samples for interval in intervals if interval.kind == "train") == 3 * GROUP_SIZE


def waits_of(intervals, lane):
    return [
        (interval.reason, interval.start_s, interval.end_s)
        for interval in intervals
        if (interval.kind, interval.lane.name) == ("wait", lane)
    ]


async def test_a_lost_slot_idles_under_that_reason_until_another_replica_takes_its_lane():
    pools = Pools(lose_slot_at=0)
    conductor = make_conductor(pools, num_prompts=2)
    await conductor.run_batch()
    lost = waits_of(conductor.recorder.drain(), "generator/1")
    pools.staged = 1
    joining = Joining("s1b", None, Lane("generator", 1, "here", 1), ["s1b"])
    pools.slot_versions |= {"s1b": 1}
    await conductor.publish(1, lost_slots=["s1"], joining=[joining])
    joined_s = conductor.recorder.now_s()
    await conductor.run_batch()
    after = conductor.recorder.drain()
    assert [reason for reason, _, _ in lost] == ["slot_lost"]
    waits = waits_of(after, "generator/1")
    assert [end_s < joined_s for reason, _, end_s in waits if reason == "slot_lost"] == [True], "it ends as one joins"
    joined = [interval for interval in after if interval.kind == "generate" and interval.lane.index == 1]
    assert {interval.version for interval in joined} == {1}, "the newest weights"


def test_a_slot_of_a_replica_that_is_given_up_stays_lost_when_its_own_chunk_ends():
    """Slot s1 hangs, and its replica is given up after 50 s; the chunk of its other slot ends at 60 s."""
    pools, replica = Hanging(("generate", "s1")), ["s1", "s2"]
    generate = pools.generate

    async def generate_slowly(slot, chunk):
        await asyncio.sleep(30.0)
        return await generate(slot, chunk)

    pools.generate = generate_slowly
    _, took_s, conductor = run_hanging(pools, num_batches=1, replicas=[["s0"], replica])
    assert took_s >= 60.0
    intervals = conductor.recorder.drain()
    assert waits_of(intervals, "generator/1")[-1] == ("slot_lost", 50.0, took_s)


class SlowLoad(Pools):
    """The slots of `gated` load when `gate` is set."""

    def __init__(self, *gated):
        super().__init__()
        self.gate, self.gated = asyncio.Event(), set(gated)

    async def load(self, slots):
        if self.gated.intersection(slots):
            await self.gate.wait()
        return await super().load(slots)


@pytest.mark.parametrize("is_handled", [False, True], ids=["load in flight", "load ended, its event not handled"])
async def test_a_replica_lost_while_it_loads_is_lost_and_the_run_goes_on(is_handled):
    pools = SlowLoad("s1")
    conductor = make_conductor(pools, num_prompts=2, max_versions=1)
    await conductor.run_batch()
    pools.staged = 1
    await conductor.publish(1)
    await spin()
    await conductor.run_batch()  # on the other slot
    pools.staged = 2
    if is_handled:
        pools.gate.set()
    await conductor.publish(2, lost_slots=["s1"])
    pools.gate.set()
    await spin()
    outcome = await conductor.run_batch()
    assert not conductor.planner.has_slot("s1") and len(outcome.groups) == 2


async def test_a_lost_slot_takes_the_other_slots_of_its_replica_with_it_also_while_one_waits_to_load():
    pools = Pools()
    replica = ["s1", "s2"]
    conductor = make_conductor(pools, num_prompts=2, replicas=[["s0"], replica], max_versions=1)
    lost = asyncio.Event()
    generate = pools.generate

    async def dies_when_told(slot, chunk):
        if slot == "s2" and chunk.batch == 1:
            await lost.wait()
            return GeneratedChunk(dict.fromkeys(chunk.samples, "died"), is_slot_lost=True)
        return await generate(slot, chunk)

    pools.generate = dies_when_told
    await conductor.run_batch()
    await spin()  # s2 generates for the next batch, under the old version
    pools.staged = 1
    await conductor.publish(1)
    await spin()
    assert ("load", ("s0",)) in pools.calls and not any(set(replica) & set(call[1]) for call in loads(pools))
    lost.set()
    outcome = await conductor.run_batch()
    assert not any(map(conductor.planner.has_slot, replica)) and len(outcome.groups) == 2


def loads(pools):
    return [call for call in pools.calls if call[0] == "load"]


@pytest.mark.virtual_time
async def test_a_trainer_whose_slots_are_overdue_waits_for_an_event_and_asks_once_more_at_most():
    """One slot takes 1,000 times as long as measured; assisting never pays."""
    overdue_s = 100.0

    class Overdue(Pools):
        is_overdue = False
        searches = 0

        async def generate(self, slot, chunk):
            await asyncio.sleep(overdue_s if self.is_overdue else 0.1)
            return await self._make(chunk)

        async def accumulate(self, fragment, groups):
            await asyncio.sleep(0.05)
            self.trained += fragment.uids

        async def assist(self, chunks):
            await asyncio.sleep(1000)
            return [await self._make(chunk) for chunk in chunks]

    pools = Overdue()
    loop = asyncio.get_running_loop()
    conductor = make_conductor(pools, num_prompts=2, now_s=loop.time, assist="bts", chunk_size=1)
    await conductor.run_batch()
    pools.staged = 1
    await conductor.publish(1)
    pools.is_overdue = True
    asked = []
    ask = conductor.planner.next_for_trainer
    conductor.planner.next_for_trainer = lambda now_s: asked.append(now_s) or ask(now_s)
    begun_s = loop.time()
    await conductor.run_batch()
    num_events = 8 + 8 + 2 + 1 + 1  # generated, scored, trained, begun, committed
    assert loop.time() - begun_s >= overdue_s and len(asked) <= 2 * num_events


SHORT = DeadlinesConfig(first_s=1.0, answer_s=50.0, train_s=80.0)


class Hanging(Pools):
    """The calls in `hangs`, each as (method, slot or None), do not answer."""

    def __init__(self, *hangs):
        super().__init__()
        self.hangs = set(hangs)

    async def discard(self, chunk):
        if ("discard", None) in self.hangs:
            await asyncio.Event().wait()
        self.hangs.discard(("collect", None))
        await super().discard(chunk)


def may_hang(method):
    """A method of `Pools` that does not answer while it is among the calls that hang."""

    async def call(self, *args):
        slot = args[0] if method == "generate" else args[0][0] if method == "load" else None
        if (method, slot) in self.hangs:
            await asyncio.Event().wait()
        return await getattr(Pools, method)(self, *args)

    return call


for method in ("generate", "load", "collect", "cancel", "assist", "begin", "accumulate", "commit", "abort"):
    setattr(Hanging, method, may_hang(method))


def run_hanging(pools, num_batches=2, **rules):
    """Run batches until the end or an error -> (outcomes or the error, virtual seconds, the conductor)."""

    async def batches():
        loop = asyncio.get_running_loop()
        conductor = make_conductor(pools, now_s=loop.time, deadlines=SHORT, **rules)
        outcomes = []
        try:
            for number in range(num_batches):
                outcomes.append(await conductor.run_batch())
                pools.staged = number + 1
                await conductor.publish(number + 1)
                await conductor.drain()
        except RunStopped as error:
            return error, loop.time(), conductor
        return outcomes, loop.time(), conductor

    return run_in_virtual_time(batches())


@pytest.mark.parametrize("method", ["generate", "load"])
def test_a_replica_that_hangs_is_ended_within_its_bound_and_no_sample_is_lost(method):
    pools = Hanging((method, "s1"))
    outcomes, took_s, conductor = run_hanging(pools)
    assert [len(outcome.groups) for outcome in outcomes] == [3, 3]
    assert ("end", ("s1",)) in pools.calls and not conductor.planner.has_slot("s1")
    assert SHORT.answer_s <= took_s <= SHORT.answer_s + 1
    trained = [key for key in pools.generated if key[0] in pools.trained]
    assert len(trained) == len(set(trained)) == 6 * GROUP_SIZE
    if method == "generate":
        assert [call for call in pools.calls if call[0] == "discard"], "the chunk's worker forgets it"


def test_samples_whose_scores_are_overdue_are_generated_again_and_trained_once():
    pools = Hanging(("collect", None))
    outcomes, took_s, _ = run_hanging(pools, num_batches=1, **{"max_sample_refills": 100, "max_group_refills": 3})
    (outcome,) = outcomes
    assert len(outcome.groups) == 3 and SCORE_S <= took_s < SHORT.train_s
    assert outcome.report.num_sample_refills > 0
    trained = {(uid, index) for uid in outcome.groups for index in range(GROUP_SIZE)}
    unwanted = {(name.uid, name.sample_index) for name in outcome.unwanted}
    assert len(trained) == 3 * GROUP_SIZE and not unwanted & trained, "trained under the same name: not cleared"


def test_samples_whose_scores_were_given_up_are_cleared_if_their_group_is_dropped():
    pools = Hanging(("collect", None))
    outcomes, _, _ = run_hanging(pools, num_batches=1, **{"max_sample_refills": 0, "max_group_refills": 6})
    (outcome,) = outcomes
    dropped = {name.uid for name in outcome.unwanted}
    assert dropped and outcome.published.condition_keys == {
        f"conditions of {uid}" for uid in (*outcome.groups, *dropped)
    }
    assert len(outcome.unwanted) == len(dropped) * GROUP_SIZE
    assert outcome.published.doubtful_groups == dropped


@pytest.mark.parametrize(
    "method, bound_s, named",
    [
        ("begin", 80.0, "opening a batch"),
        ("accumulate", 80.0, r"training fragment 0 \(1 groups\)"),
        ("commit", 80.0, "the optimizer step"),
        ("assist", 80.0, r"chunk \d+ \(1 samples of group p\d+\) on the trainer"),
    ],
)
def test_a_trainer_that_hangs_ends_the_run_within_its_bound_and_the_message_names_the_call(method, bound_s, named):
    pools = Hanging((method, None), ("abort", None))
    rules = {"assist": "always", "assist_chunk_size": 1} if method == "assist" else {}
    error, took_s, _ = run_hanging(pools, **rules)
    assert isinstance(error, DeadlineMissed)
    assert bound_s <= took_s <= bound_s + SHORT.answer_s + 1
    with pytest.raises(DeadlineMissed, match=rf"step 1: {named}.* raise digen\.deadlines\.\w+_s"):
        raise error


def test_an_agent_loop_worker_that_takes_no_message_ends_the_run():
    error, _, _ = run_hanging(Hanging(("generate", "s1"), ("discard", None)))
    with pytest.raises(DeadlineMissed, match=r"discarding chunk \d+ .*digen\.deadlines\.answer_s"):
        raise error


def test_a_replica_that_takes_no_cancellation_is_judged_by_its_chunk_alone():
    pools = Hanging(("cancel", None))

    async def generate(slot, chunk):
        if chunk.uid == "p001":
            await asyncio.sleep(30.0)  # slow, and in time
        return await Hanging.generate(pools, slot, chunk)

    pools.generate = generate
    outcomes, _, conductor = run_hanging(pools, num_batches=1, extra_prompts=1, slots=("s0", "s1", "s2"))
    assert list(outcomes[0].groups) == ["p000", "p002", "p003"]
    assert all(map(conductor.planner.has_slot, ("s0", "s1", "s2")))
