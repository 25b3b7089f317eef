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

DEADLINES = Deadlines(DeadlinesConfig(no_progress_s=3000.0))


class Book:
    """Calls, and their ends."""

    def __init__(self):
        self.calls = CallsUnderWay(DEADLINES)
        self.ended, self.overdue = [], []

    def start(self, name, takes_s, bound_s):
        self.calls.start(
            asyncio.sleep(takes_s),
            what=name,
            bound=Bound(bound_s, "digen.deadlines.train_s"),
            on_ended=lambda task, took_s: self.ended.append((name, round(took_s, 3))),
            on_overdue=lambda error: self.overdue.append((name, str(error))),
        )


def test_a_call_that_ends_in_time_is_handled_with_the_seconds_it_took():
    async def run():
        book = Book()
        book.start("a", 5.0, 10.0)
        assert await book.calls.next_events() and not len(book.calls)
        return book

    book = run_in_virtual_time(run())
    assert book.ended == [("a", 5.0)] and book.overdue == []


def test_an_overdue_call_is_cancelled_and_named_within_its_bound_while_others_go_on():
    async def run():
        book = Book()
        book.start("slow", 500.0, 600.0)
        book.start("hangs", 1e9, 20.0)
        began_s = asyncio.get_running_loop().time()
        assert await book.calls.next_events()
        assert asyncio.get_running_loop().time() - began_s == pytest.approx(20.0, abs=0.01)
        assert len(book.calls) == 1
        assert await book.calls.next_events()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1, "the overdue one was cancelled"
        return book

    book = run_in_virtual_time(run())
    assert book.ended == [("slow", 500.0)]
    ((name, message),) = book.overdue
    assert name == "hangs" and "for 20 s" in message and "raise digen.deadlines.train_s" in message


def test_calls_that_end_together_are_handled_in_the_order_of_their_start():
    async def run():
        book = Book()
        for name in "abcdefgh":
            book.start(name, 1.0, 10.0)
        await book.calls.next_events()
        return [name for name, _ in book.ended]

    assert run_in_virtual_time(run()) == list("abcdefgh")


def test_a_long_wait_is_reported_again_and_again_and_then_ends_the_run(caplog):
    async def run():
        book = Book()
        book.start("a", 1e9, 1e6)
        book.start("b", 1e9, 1e6)
        await book.calls.next_events()

    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineMissed, match=r"a for 3000.* b for .*no_progress_s"):
        run_in_virtual_time(run())
    reports = [record.getMessage() for record in caplog.records if "nothing happened" in record.getMessage()]
    assert [text.split(" s;")[0] for text in reports] == [
        f"nothing happened for {s}" for s in (100, 200, 400, 800, 1600)
    ]
    assert all("a for" in text and "b for" in text for text in reports)


def test_a_timeout_of_the_caller_is_no_event():
    async def run():
        book = Book()
        book.start("a", 50.0, 60.0)
        return [await book.calls.next_events(10.0), await book.calls.next_events(100.0)]

    assert run_in_virtual_time(run()) == [False, True]


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

    async def run():
        book = Book()
        for _ in range(500):
            book.calls.start(asyncio.sleep(1e5), what="long", bound=bound, on_ended=None)
        for _ in range(20):
            book.start("short", 1.0, 1e6)
            assert await book.calls.next_events()
        return len(book.ended)

    assert run_in_virtual_time(run()) == 20
    assert bound.num_reads <= 2 * 500, "at the start of each"


def test_the_earliest_deadline_counts_whichever_call_was_started_last():
    async def run():
        book = Book()
        book.start("hangs", 1e9, 20.0)
        book.start("ends", 5.0, 10.0)
        book.start("slow", 500.0, 600.0)
        times_s = []
        for _ in range(3):
            assert await book.calls.next_events()
            times_s.append(round(asyncio.get_running_loop().time(), 1))
        return times_s[1] - times_s[0], times_s[2] - times_s[0], [name for name, _ in (*book.ended, *book.overdue)]

    assert run_in_virtual_time(run()) == (15.0, 495.0, ["ends", "slow", "hangs"])


def test_calls_that_end_together_are_kept_when_the_handler_of_one_raises():
    async def run():
        book = Book()

        def fail(task, took_s):
            raise RuntimeError("boom")

        book.calls.start(asyncio.sleep(1.0), what="bad", bound=Bound(10.0, "k"), on_ended=fail)
        book.start("good", 1.0, 10.0)
        with pytest.raises(RuntimeError, match="boom"):
            await book.calls.next_events()
        assert await book.calls.next_events()
        return book.ended

    assert run_in_virtual_time(run()) == [("good", 1.0)]


def test_a_call_that_is_in_flight_when_its_loop_is_closed_is_dropped_in_silence(monkeypatch):
    raised = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)

    async def begin():
        book = Book()
        book.start("a", 1e9, 1e9)
        waiting = asyncio.ensure_future(book.calls.next_events())
        await asyncio.sleep(0.01)
        return waiting

    loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    loop.close()
    gc.collect()
    assert raised == []
