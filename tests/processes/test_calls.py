# SPDX-License-Identifier: Apache-2.0
"""Calls in flight, in virtual time."""

import asyncio
import gc
import logging
import sys

import pytest

from tests.chaos.loop import run_in_virtual_time
from verl_digen.errors import DeadlineMissed
from verl_digen.processes.calls import CallsUnderWay
from verl_digen.processes.deadlines import Bound, Deadlines, DeadlinesConfig

DEADLINES = Deadlines(DeadlinesConfig(no_progress_s=3000.0, answer_s=5.0), score_s=20.0)


def call(calls, takes_s, bound_s, what="a"):
    return calls.call(asyncio.sleep(takes_s, "slept"), what=what, bound=Bound(bound_s, "digen.deadlines.train_s"))


def in_virtual_time(scenario):
    """Run `scenario(calls)` -> (what it returns or raises, seconds it took, tasks that it left)."""

    async def run():
        calls = CallsUnderWay(DEADLINES)
        try:
            outcome = await scenario(calls)
        except Exception as error:
            outcome = error
        took_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0.01)
        return outcome, pytest.approx(took_s, abs=0.01), len(asyncio.all_tasks()) - 1

    return run_in_virtual_time(run())


def test_a_call_that_ends_in_time_has_a_result_and_the_seconds_it_took():
    async def scenario(calls):
        return await call(calls, 5.0, 10.0)

    assert in_virtual_time(scenario) == (("slept", 5.0), 5.0, 0)


def test_an_overdue_call_is_cancelled_and_named_within_its_bound_while_others_go_on():
    async def scenario(calls):
        ended = []

        async def slow():
            ended.append(await call(calls, 500.0, 600.0))

        calls.spawn(slow())
        with pytest.raises(DeadlineMissed, match=r"hangs .*for 20 s.* raise digen\.deadlines\.train_s"):
            await call(calls, 1e9, 20.0, "hangs")
        assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=0.01) and len(calls) == 1
        await calls.changed()
        return ended

    assert in_virtual_time(scenario) == ([("slept", 500.0)], 500.0, 0)


def test_a_call_is_cancelled_with_the_task_that_waits_for_it():
    async def scenario(calls):
        waiting = asyncio.ensure_future(call(calls, 1e9, 1e9))
        await asyncio.sleep(1.0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return calls.describe()

    assert in_virtual_time(scenario) == ("every call under way ()", 1.0, 0)


def test_a_long_wait_is_reported_again_and_again_and_then_ends_the_run(caplog):
    async def scenario(calls):
        calls.spawn(call(calls, 1e9, 1e6, "b"))
        try:
            await calls.run(call(calls, 1e9, 1e6))
        finally:
            calls.end()

    with caplog.at_level(logging.WARNING):
        error, took_s, num_left = in_virtual_time(scenario)
    with pytest.raises(DeadlineMissed, match=r"b for 3000.* a for .*no_progress_s"):
        raise error
    assert (took_s, num_left) == (3000.0, 0)
    reports = [record.getMessage() for record in caplog.records if "nothing happened" in record.getMessage()]
    assert [text.split(" s;")[0] for text in reports] == [
        f"nothing happened for {s}" for s in (100, 200, 400, 800, 1600)
    ]
    assert all("a for" in text and "b for" in text for text in reports)


def test_every_event_gives_a_run_its_full_patience_again():
    async def scenario(calls):
        async def event():
            await asyncio.sleep(2000.0)
            calls.notify()

        calls.spawn(event())
        return await calls.run(call(calls, 4500.0, 1e6))

    assert in_virtual_time(scenario) == (("slept", 4500.0), 4500.0, 0)


def test_a_timeout_of_the_caller_is_no_event():
    async def scenario(calls):
        calls.spawn(call(calls, 50.0, 60.0))
        return [await calls.changed(10.0), await calls.changed(100.0)]

    assert in_virtual_time(scenario) == ([False, True], 50.0, 0)


async def fail_after(seconds):
    await asyncio.sleep(seconds)
    raise RuntimeError("boom")


def test_a_run_ends_with_the_first_task_that_fails():
    async def scenario(calls):
        calls.spawn(fail_after(5.0))
        await calls.run(call(calls, 1e3, 1e4))

    error, took_s, num_left = in_virtual_time(scenario)
    assert (str(error), took_s, num_left) == ("boom", 5.0, 0)


def test_what_fails_between_two_runs_ends_the_next_before_it_begins():
    begun = []

    async def work():
        begun.append(True)

    async def scenario(calls):
        calls.spawn(fail_after(5.0))
        await asyncio.sleep(10.0)
        with pytest.raises(RuntimeError, match="boom"):
            calls.raise_failure()
        await calls.run(work())

    error, took_s, _ = in_virtual_time(scenario)
    assert (str(error), took_s, begun) == ("boom", 10.0, [])


def test_an_overdue_notification_ends_the_run_unless_it_may_be_late(caplog):
    async def scenario(calls):
        calls.tell(asyncio.sleep(1e9), "the first", may_be_late=True)
        await asyncio.sleep(10.0)
        calls.raise_failure()
        calls.tell(asyncio.sleep(1e9), "the second")
        await calls.run(call(calls, 1e3, 1e4))

    error, took_s, _ = in_virtual_time(scenario)
    assert isinstance(error, DeadlineMissed) and "the second" in str(error) and took_s == 15.0
    assert "the first" in caplog.text


class CountedBound:
    """A bound that counts how often it is read."""

    key = "digen.deadlines.train_s"

    def __init__(self):
        self.num_reads = 0

    @property
    def seconds(self):
        self.num_reads += 1
        return 1e6


def test_an_event_does_not_go_through_the_calls_in_flight():
    bound = CountedBound()

    async def scenario(calls):
        for _ in range(500):
            calls.spawn(calls.call(asyncio.sleep(1e5), what="long", bound=bound))
        for _ in range(20):
            await calls.run(call(calls, 1.0, 1e6))
        calls.end()

    in_virtual_time(scenario)
    assert bound.num_reads <= 500, "at the start of each"


def test_a_call_that_is_in_flight_when_its_loop_is_closed_is_dropped_in_silence(monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    async def begin():
        calls = CallsUnderWay(DEADLINES)
        calls.spawn(call(calls, 1e9, 1e9))
        waiting = asyncio.ensure_future(calls.run(call(calls, 1e9, 1e9)))
        await asyncio.sleep(0.01)
        return waiting

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    gc.collect()
    assert raised == []
