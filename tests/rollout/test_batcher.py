# SPDX-License-Identifier: Apache-2.0
import asyncio
import random
from dataclasses import replace

import pytest
import torch

from tests.chaos.loop import run_in_virtual_time
from tests.tags import make_facts
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.rollout.batcher import Bursts, RequestBatcher, Withdrawn
from verl_digen.sampling.sampler import SamplingStopped
from verl_digen.types import Burst, CleanRecord, Generation, Geometry, SampleRequest, Sampling, Trajectory

pytestmark = pytest.mark.virtual_time

SAMPLING = Sampling(Geometry(64, 64), num_steps=4, true_cfg_scale=1.0, law="flow", noise_level=0.7)


def request(uid: str, index: int, sampling: Sampling = SAMPLING, text: str = "a prompt") -> SampleRequest:
    return SampleRequest(uid, index, PromptInputs(text), PromptInputs(" "), Window((), ()), sampling)


def answer(asked: SampleRequest) -> Generation:
    empty = torch.empty(0)
    record = CleanRecord(empty, empty)
    path = Trajectory(make_facts(asked.uid, asked.sample_index, sampling=asked.sampling), record)
    return Generation(path, empty, started_s=0.0, ended_s=1.0)


async def arrived(asked):
    """The answers of a batch, which have come to the host."""
    return [answer(each) for each in asked]


class Recorder:
    """Executes batches on command: each batch waits for `release`."""

    def __init__(self, hold: bool = False):
        self.batches: list[list[SampleRequest]] = []
        self.running = asyncio.Event()
        self.release = asyncio.Event()
        if not hold:
            self.release.set()

    async def __call__(self, requests, should_stop):
        self.batches.append(list(requests))
        self.running.set()
        while not self.release.is_set():
            if should_stop():
                raise SamplingStopped("stopped")
            await asyncio.sleep(0.001)
        return arrived(requests)


def test_every_request_gets_its_own_answer_whatever_the_arrival_order():
    async def run(seed: int) -> list[list[tuple[str, int]]]:
        record = Recorder()
        batcher = RequestBatcher(record, max_batch_size=4, wait_s=0.01)
        requests = [request(f"p{group}", index) for group in range(3) for index in range(3)]
        random.Random(seed).shuffle(requests)
        answers = await asyncio.gather(*[batcher.submit(asked) for asked in requests])
        for asked, got in zip(requests, answers, strict=True):
            assert (got.trajectory.facts.uid, got.trajectory.facts.sample_index) == (asked.uid, asked.sample_index)
        return [[(asked.uid, asked.sample_index) for asked in batch] for batch in record.batches]

    formed = [asyncio.run(run(seed)) for seed in range(5)]
    assert all(batches == formed[0] for batches in formed), "the same requests always form the same batches"
    assert [len(batch) for batch in formed[0]] == [4, 4, 1]


async def test_prompts_of_like_length_share_a_batch():
    record = Recorder()
    batcher = RequestBatcher(record, max_batch_size=4, wait_s=0.01)
    texts = {"p0": "short", "p1": "a prompt that is much longer", "p2": "brief", "p3": "a prompt as long as that"}
    requests = [request(uid, index, text=text) for uid, text in texts.items() for index in range(2)]
    await asyncio.gather(*[batcher.submit(asked) for asked in requests])
    assert [[asked.uid for asked in batch] for batch in record.batches] == [
        ["p0", "p0", "p2", "p2"],
        ["p1", "p1", "p3", "p3"],
    ]


def chunk(uid: str, size: int, announced: int | None = None) -> list[SampleRequest]:
    """Requests of one chunk, which says that it has `announced` of them, or as many as there are."""
    burst = Burst(f"chunk {uid}", size if announced is None else announced)
    return [replace(request(uid, index), burst=burst) for index in range(size)]


def starts_of(arrivals: list[tuple[float, list[SampleRequest]]], takes_s: float = 2.0) -> list[tuple[float, list[str]]]:
    """Play requests that arrive at given times; batches of at most 8 take `takes_s` -> (start in s, uids) of each."""
    started: list[tuple[float, list[str]]] = []

    async def run() -> None:
        loop = asyncio.get_running_loop()

        async def execute(requests, should_stop):
            started.append((loop.time(), sorted(asked.uid for asked in requests)))
            await asyncio.sleep(takes_s)
            return arrived(requests)

        async def ask(at_s: float, asked: SampleRequest) -> None:
            await asyncio.sleep(at_s)
            await batcher.submit(asked)

        batcher = RequestBatcher(execute, max_batch_size=8, wait_s=0.05)
        await asyncio.gather(*[ask(at_s, asked) for at_s, requests in arrivals for asked in requests])

    run_in_virtual_time(run())
    return started


def test_a_chunk_starts_when_its_last_sample_arrives():
    first, *others = chunk("a", 4)
    assert starts_of([(0.0, [first]), (0.01, others)]) == [(pytest.approx(0.01), ["a"] * 4)]


def test_a_request_without_a_burst_and_one_whose_burst_never_comes_wait_for_others():
    assert starts_of([(0.0, [request("a", 0)])]) == [(pytest.approx(0.05), ["a"])]
    assert starts_of([(0.0, chunk("a", 2, announced=3))]) == [(pytest.approx(0.05), ["a"] * 2)]


def test_what_is_left_after_a_full_batch_follows_at_once_also_without_a_burst():
    for asked in (chunk("a", 12), [request("a", index) for index in range(12)]):
        assert starts_of([(0.0, asked)]) == [(0.0, ["a"] * 8), (pytest.approx(2.0), ["a"] * 4)]


def test_chunks_of_several_groups_run_one_after_the_other_in_the_order_of_arrival():
    first, second, third = (chunk(uid, 2) for uid in "bac")
    refill = replace(second[0], sample_index=7, burst=Burst("refill", 1))
    played = starts_of([(0.0, first[:1]), (0.01, [first[1], *second]), (1.0, [*third, refill])])
    assert played == [
        (pytest.approx(0.01), ["b"] * 2),
        (pytest.approx(2.01), ["a"] * 3),
        (pytest.approx(4.01), ["c"] * 2),
    ]


def test_a_group_that_is_complete_does_not_wait_for_the_one_behind_it():
    late = chunk("b", 2)
    played = starts_of([(0.0, [*chunk("a", 2), late[0]]), (0.02, late[1:])])
    assert played == [(0.0, ["a"] * 2), (pytest.approx(2.0), ["b"] * 2)]


async def test_a_complete_chunk_starts_when_the_incomplete_one_beside_it_is_cancelled():
    record = Recorder()
    batcher = RequestBatcher(record, max_batch_size=8, wait_s=10.0)
    asked = [*chunk("a", 2), replace(request("a", 7), burst=Burst("refills", 2))]
    waiting = [asyncio.ensure_future(batcher.submit(each)) for each in asked]
    await asyncio.sleep(1.0)
    assert not record.batches
    batcher.withdraw("a", 7)
    await asyncio.gather(*waiting, return_exceptions=True)
    assert asyncio.get_running_loop().time() == pytest.approx(1.0)


async def test_a_batch_holds_only_requests_with_equal_sampling():
    record = Recorder()
    batcher = RequestBatcher(record, max_batch_size=8, wait_s=0.01)
    other = replace(SAMPLING, num_steps=9)
    await asyncio.gather(*[batcher.submit(request("p", index, other if index % 2 else SAMPLING)) for index in range(6)])
    assert [len({asked.sampling for asked in batch}) for batch in record.batches] == [1, 1]


async def test_a_paused_batcher_keeps_requests_until_it_resumes():
    record = Recorder()
    batcher = RequestBatcher(record, max_batch_size=2, wait_s=0.0)
    batcher.pause()
    waiting = [asyncio.create_task(batcher.submit(request("p", index))) for index in range(2)]
    done, _ = await asyncio.wait(waiting, timeout=0.05)
    assert not done and not record.batches
    batcher.resume()
    await asyncio.gather(*waiting)
    assert len(record.batches) == 1


async def test_withdrawn_requests_leave_the_queue_and_stop_a_batch_that_nobody_wants():
    record = Recorder(hold=True)
    batcher = RequestBatcher(record, max_batch_size=2, wait_s=0.0)
    uids = ("a", "a", "b", "b", "c")
    waiting = [asyncio.ensure_future(batcher.submit(request(uid, index))) for index, uid in enumerate(uids)]
    await record.running.wait()
    batcher.withdraw("b", 2)
    batcher.withdraw("a", 0)
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [True, False, True, False, False], "a1 is still wanted"
    batcher.withdraw("a", 1)
    record.release.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [isinstance(outcome, Withdrawn) for outcome in outcomes] == [True, True, True, False, False]
    assert [[asked.uid for asked in batch] for batch in record.batches] == [["a", "a"], ["b", "c"]]
    batcher.withdraw("never asked for", 0)


@pytest.mark.parametrize(
    ("error", "size", "told"),
    [
        (ValueError("out of memory"), 2, "out of memory"),
        (asyncio.CancelledError(), 1, "stopped generating"),  # also those that wait
        (None, 2, "a batch of 2 requests got 0 answers"),
    ],
    ids=["fails", "cancelled", "no answers"],
)
async def test_a_batch_that_fails_tells_each_of_its_callers_and_the_next_one_runs(error, size, told):
    failures = [error]

    async def execute(requests, should_stop):
        if failures and (failure := failures.pop()):
            raise failure
        return arrived(requests if requests[0].uid == "b" else [])

    batcher = RequestBatcher(execute, max_batch_size=size, wait_s=0.0)
    both = [batcher.submit(request("a", index)) for index in range(2)]
    assert [told in str(outcome) for outcome in await asyncio.gather(*both, return_exceptions=True)] == [True] * 2
    assert (await batcher.submit(request("b", 0))).trajectory.facts.uid == "b"


class Device:
    """A device on a virtual clock: a batch runs for 2 s, and its answers come to the host `answer_s` later."""

    def __init__(self, answer_s: float, errors: tuple[BaseException, ...] = ()):
        self.answer_s, self.errors = answer_s, list(errors)
        self.log: list[tuple[str, float]] = []
        self.num_answering = 0

    def note(self, what: str) -> None:
        self.log.append((what, asyncio.get_running_loop().time()))

    async def __call__(self, requests, should_stop):
        self.note(f"run {requests[0].uid}")
        await asyncio.sleep(2.0)
        return self.answers(requests)

    async def answers(self, requests):
        self.num_answering += 1
        assert self.num_answering == 1, "answers of two batches are under way"
        await asyncio.sleep(self.answer_s)
        self.num_answering -= 1
        if self.errors:
            raise self.errors.pop(0)
        self.note(f"answer {requests[0].uid}")
        return [answer(asked) for asked in requests]

    def times(self) -> dict[str, float]:
        return {what: round(at_s, 3) for what, at_s in self.log}


def submitted(device: Device, *uids: str) -> tuple[RequestBatcher, list[asyncio.Task[Generation]]]:
    """Batches of one chunk each."""
    batcher = RequestBatcher(device, max_batch_size=2, wait_s=10.0)
    tasks = [asyncio.ensure_future(batcher.submit(asked)) for uid in uids for asked in chunk(uid, 2)]
    return batcher, tasks


@pytest.mark.parametrize(("answer_s", "third"), [(0.5, 4.0), (3.0, 5.0)])
async def test_the_next_batch_runs_while_the_answers_of_the_last_one_come(answer_s: float, third: float):
    device = Device(answer_s)
    _, tasks = submitted(device, "a", "b", "c")
    await asyncio.gather(*tasks)
    times = device.times()
    assert (times["run a"], times["run b"], times["run c"]) == (0.0, 2.0, third)
    assert times["answer a"] == 2.0 + answer_s


async def test_exclusive_work_begins_when_the_last_batch_is_answered():
    device = Device(0.5)
    batcher, tasks = submitted(device, "a", "b")
    await asyncio.sleep(1.0)
    async with batcher.exclusive():
        device.note("update")
        await asyncio.sleep(1.0)
    await asyncio.gather(*tasks)
    times = device.times()
    assert (times["answer a"], times["update"], times["run b"]) == (2.5, 2.5, 3.5)


async def test_a_sample_is_cancelled_while_its_answer_comes_and_other_answers_are_told():
    device = Device(3.0)
    batcher, tasks = submitted(device, "a", "b")
    await asyncio.sleep(3.0)
    batcher.withdraw("a", 0)
    await asyncio.sleep(0)
    assert [task.done() for task in tasks] == [True, False, False, False]
    first, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(first, Withdrawn)
    assert [other.trajectory.facts.uid for other in others] == ["a", "b", "b"]


@pytest.mark.parametrize("error", [RuntimeError("an illegal address"), asyncio.CancelledError()])
async def test_answers_that_do_not_come_fail_their_own_batch(error: BaseException):
    device = Device(0.5, (error,))
    _, tasks = submitted(device, "a", "b")
    *failed, one, other = await asyncio.gather(*tasks, return_exceptions=True)
    expected = str(error) or "stopped generating"
    assert [isinstance(each, RuntimeError) and expected in str(each) for each in failed] == [True, True]
    assert (one.trajectory.facts.uid, other.trajectory.facts.uid) == ("b", "b")


@pytest.mark.parametrize("seed", range(3))
async def test_no_request_is_lost_under_random_pauses_and_updates(seed: int):
    rng = random.Random(seed)
    record = Recorder()
    batcher = RequestBatcher(record, max_batch_size=3, wait_s=0.001)

    async def disturb() -> None:
        for _ in range(20):
            await asyncio.sleep(rng.random() * 0.003)
            batcher.pause()
            async with batcher.exclusive():
                await asyncio.sleep(rng.random() * 0.002)
            batcher.resume()

    async def ask(index: int) -> Generation:
        await asyncio.sleep(rng.random() * 0.05)
        return await batcher.submit(request("p", index))

    answers, _ = await asyncio.gather(asyncio.gather(*[ask(index) for index in range(40)]), disturb())
    assert [got.trajectory.facts.sample_index for got in answers] == list(range(40))


def test_a_burst_that_does_not_come_whole_is_forgotten_at_the_next_batch():
    async def run() -> None:
        batcher = RequestBatcher(Recorder(), max_batch_size=8, wait_s=0.05)
        for asked in (*chunk("a", 1, announced=3), *chunk("b", 1)):
            await batcher.submit(asked)
        assert not batcher._bursts._missing

    run_in_virtual_time(run())


def test_bursts_that_no_request_waits_for_are_forgotten():
    seen, one = Bursts(), Burst("a", 3)
    for burst in (one, Burst("c", 2)):
        seen.arrive(burst)
    seen.forget_all_but([one, None])
    for _ in range(2):
        seen.arrive(one)
    assert seen.are_complete([one]), "two of them started or were cancelled"
    assert seen._missing == {}
