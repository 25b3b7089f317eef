# SPDX-License-Identifier: Apache-2.0
"""Processes that die or hang while the driver waits, in virtual time."""

import asyncio
import pickle
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.chaos.loop import run_in_virtual_time
from verl_digen.errors import DeadlineMissed, ProcessLost, ReplicasLost, RunStopped
from verl_digen.processes import actors
from verl_digen.processes.calls import Patience
from verl_digen.processes.deadlines import Bound, Deadlines, DeadlinesConfig
from verl_digen.processes.supervision import Supervision, within

CONFIG = DeadlinesConfig(answer_s=10.0, no_progress_s=100.0, first_s=20.0, train_s=20.0)


def supervision(end_silent_replicas=None, end_all=None, cancel_queue_calls=list):
    return Supervision(
        Deadlines(CONFIG, score_s=20.0),
        loop=SimpleNamespace(begin=asyncio.ensure_future, time=asyncio.get_running_loop().time),
        step=lambda: 3,
        end_silent_replicas=end_silent_replicas,
        end_all=end_all,
        cancel_queue_calls=cancel_queue_calls,
    )


class Process:
    """Answers heartbeats until `fails_s`; from then on raises `error`, or hangs if that is None. With `is_starting` it
    does not answer because it is being restarted."""

    def __init__(self, fails_s, error=None, is_starting=False):
        self.fails_s, self.error, self.is_starting, self.is_killed = fails_s, error, is_starting, False
        self.__dict__["__ray_ready__"] = SimpleNamespace(remote=self.answer)

    async def answer(self):
        loop = asyncio.get_running_loop()
        if loop.time() >= self.fails_s:
            if self.error is None:
                await loop.create_future()
            raise self.error


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda process: setattr(process, "is_killed", True))
    monkeypatch.setattr(actors, "is_starting", lambda process: process.is_starting)


def watch(process, work_s):
    """Do work of `work_s` while a process is watched -> (when it ended, what raised, cancelled TransferQueue calls)."""

    async def run():
        cancelled = []
        loop = asyncio.get_running_loop()
        watched = supervision(cancel_queue_calls=lambda: cancelled.append(loop.time()))
        watched.watch_processes({"agent loop worker 3": process})
        try:
            await watched.unless_lost(asyncio.sleep(work_s))
            raised = None
        except ProcessLost as error:
            raised = error
            with pytest.raises(ProcessLost):
                watched.check()
            with pytest.raises(ProcessLost):
                await watched.unless_lost(asyncio.sleep(1.0))
        ended_s = loop.time()
        await asyncio.sleep(3.0)
        return ended_s, raised, cancelled

    return run_in_virtual_time(run())


def test_work_goes_on_while_signs_of_life_come():
    for process in (Process(fails_s=1e9), Process(fails_s=25.0, is_starting=True)):
        assert watch(process, work_s=1000.0) == (1000.0, None, []) and not process.is_killed


@pytest.mark.parametrize(
    "error, ended_s, reason",
    [
        (None, 40.0, r"agent loop worker 3 gives no sign of life for 10 s \(digen\.deadlines\.answer_s\)"),
        (ActorDiedError(), 30.0, "agent loop worker 3 is lost"),
        (ActorUnavailableError("reset", None), 32.5, "agent loop worker 3 is lost .*unavailable"),
    ],
    ids=["hangs", "died", "out of reach"],
)
def test_work_ends_when_a_process_is_lost_which_is_ended_with_all_calls_of_the_queue(error, ended_s, reason):
    process = Process(fails_s=25.0, error=error)
    now_s, raised, cancelled = watch(process, work_s=1000.0)
    assert now_s == pytest.approx(ended_s)
    with pytest.raises(ProcessLost, match=reason):
        raise raised
    assert process.is_killed
    assert len(cancelled) >= 3, "again and again: the driver may begin another call"


async def test_what_work_raises_is_raised_as_it_is():
    work = asyncio.get_running_loop().create_future()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervision().unless_lost(work)


class Call:
    """A blocking call that succeeds after `takes_s`, or fails when everything is killed. `num_silent` replicas hang,
    each noticed after the previous one, and silent from then on."""

    def __init__(self, takes_s, num_silent=0):
        self.takes_s, self.num_silent = takes_s, num_silent
        self.ended = []
        self.is_over = asyncio.Event()
        self.watch = supervision(self.end_silent_replicas, self.end_all).watch

    async def end_silent_replicas(self):
        if len(self.ended) < self.num_silent:
            self.ended.append("replica")
        return [f"r{number}" for number in range(len(self.ended))]

    def end_all(self):
        self.ended.append("all")
        self.is_over.set()

    async def call(self):
        with self.watch("publish", "sending weights"):
            try:
                await asyncio.wait_for(self.is_over.wait(), self.takes_s)
            except asyncio.TimeoutError:
                return
            raise ActorDiedError


def run_call(**given):
    async def run():
        made = Call(**given)
        try:
            await made.call()
        finally:
            now_s = asyncio.get_running_loop().time()
        await asyncio.sleep(1000.0)  # a leftover guard would kill something now
        return made, now_s

    return run_in_virtual_time(run())


def test_a_call_in_time_ends_nothing_then_or_later():
    made, now_s = run_call(takes_s=19.0)
    assert made.ended == [] and now_s == pytest.approx(19.0)


def test_replicas_without_a_sign_of_life_are_ended_first_and_the_call_has_its_time_once_more_each_time():
    made, _ = run_call(takes_s=59.0, num_silent=2)
    assert made.ended == ["replica", "replica"]


@pytest.mark.parametrize("num_silent, waited_s", [(0, 20), (1, 40), (2, 60)])
def test_a_call_that_is_overdue_with_all_replicas_answering_ends_the_run_and_says_which_key(num_silent, waited_s):
    with pytest.raises(DeadlineMissed, match=rf"step 3: sending weights .* {waited_s} s.* digen\.deadlines\.train_s"):
        run_call(takes_s=1e6, num_silent=num_silent)


def test_what_fails_by_itself_is_raised_as_it_is():
    async def run():
        made = Call(takes_s=1.0)
        made.is_over.set()
        await made.call()

    with pytest.raises(ActorDiedError):
        run_in_virtual_time(run())


def test_a_count_that_stands_still_for_too_long_is_an_error_and_one_that_moves_is_not(caplog):
    now = SimpleNamespace(s=0.0)
    patience = Patience(CONFIG, lambda: now.s)
    for count, now.s in [(0, 0.0), (0, 90.0), (1, 110.0), (1, 205.0)]:
        patience.check(count, lambda: "the groups of step 3")
    now.s = 300.0
    patience.restart()
    patience.check(1, lambda: "the groups of step 4")
    now.s = 390.0
    patience.check(1, lambda: "the groups of step 4")
    assert "nothing happened for 90 s; waiting for the groups of step 4" in caplog.text
    now.s = 401.0
    with pytest.raises(DeadlineMissed, match=r"the groups of step 4 .* 101 s.*raise digen\.deadlines\.no_progress_s"):
        patience.check(1, lambda: "the groups of step 4")


@pytest.mark.parametrize("error", [DeadlineMissed("a call", 1.0, "a.key"), ReplicasLost(), ProcessLost("a rank")])
def test_what_ends_a_run_reaches_another_process_as_what_it_is(error):
    found = pickle.loads(pickle.dumps(error))
    assert isinstance(found, type(error)) and str(found) == str(error)


def test_blocking_work_is_given_up_when_it_is_overdue():
    bound = Bound(0.2, "digen.deadlines.setup_s")
    assert within(Bound(60.0, "unused"), lambda: 7, what="counting") == 7
    for error in (KeyError("mine"), TimeoutError("its own"), CancelledError()):
        with pytest.raises(type(error)) as raised:
            within(Bound(60.0, "unused"), lambda error=error: _raise(error), what="failing")
        assert raised.value is error
    never = threading.Event()
    with pytest.raises(DeadlineMissed, match=r"loading the models .*raise digen\.deadlines\.setup_s"):
        within(bound, never.wait, what="loading the models")
    never.set()


def _raise(error):
    raise error


async def test_a_full_disk_ends_the_run_with_its_step():
    said = r"step 3 failed: OSError: \[Errno 28\] No space"
    with pytest.raises(RunStopped, match=said), supervision().ends_explained():
        raise OSError(28, "No space left on device")
