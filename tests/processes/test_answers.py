# SPDX-License-Identifier: Apache-2.0
"""Answers of many calls: their order, and the first failure."""

import asyncio
import random
import threading
from concurrent.futures import Future
from functools import partial

import pytest

from verl_digen.processes.answers import Sent, answers_of


def calls_of(futures):
    return [Sent(future, lambda future: [future.result()]) for future in futures]


def in_a_thread(*work):
    def run():
        for one in work:
            one()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


async def wait(futures):
    return await asyncio.wait_for(answers_of(calls_of(futures)), 60.0)


def test_answers_have_the_order_of_the_calls_whatever_the_order_of_their_ends():
    draw = random.Random(3)
    for count in (1, 2, 300):
        futures = [Future() for _ in range(count)]
        ends = [partial(future.set_result, number) for number, future in enumerate(futures)]
        draw.shuffle(ends)
        threads = [in_a_thread(*ends[::2]), in_a_thread(*ends[1::2])]
        assert asyncio.run(wait(futures)) == [[number] for number in range(count)]
        for thread in threads:
            thread.join()


def test_no_call_and_calls_that_have_ended_are_not_waited_for():
    assert asyncio.run(wait([])) == []
    ended = Future()
    ended.set_result(5)
    assert asyncio.run(wait([ended, ended])) == [[5], [5]]


def test_the_first_failure_is_raised_at_once_and_later_answers_change_nothing(caplog):
    first, second, never = Future(), Future(), Future()

    async def fail():
        waiting = asyncio.ensure_future(answers_of(calls_of([never, second, first])))
        await asyncio.sleep(0)  # it begins
        first.set_exception(KeyError("first"))
        second.set_exception(ValueError("second"))
        with pytest.raises(KeyError, match="first"):
            await asyncio.wait_for(waiting, 60.0)
        await asyncio.sleep(0)

    asyncio.run(fail())
    never.set_exception(OSError())  # the loop is closed
    assert not caplog.records, "nor does one break the loop or the thread that brings it"


def test_the_loop_is_woken_once(monkeypatch):
    futures, woken = [Future() for _ in range(100)], []

    async def count():
        loop = asyncio.get_running_loop()
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (woken.append(args), wake(*args)))
        waiting = asyncio.ensure_future(answers_of(calls_of(futures)))
        await asyncio.sleep(0)  # it begins
        in_a_thread(*(partial(future.set_result, 0) for future in futures))
        await asyncio.wait_for(waiting, 60.0)

    asyncio.run(count())
    assert len(woken) == 1


def test_who_waits_may_give_up(caplog):
    future = Future()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(answers_of(calls_of([future])), 0.01)
        future.set_result(1)
        await asyncio.sleep(0)

    asyncio.run(give_up())
    assert not caplog.records, "the late answer does not break the loop"
