# SPDX-License-Identifier: Apache-2.0
"""Calls of TransferQueue from two threads: the first one of a process runs alone."""

import threading

import pytest

from verl_digen.store.client import FirstAlone

TIMEOUT_S = 60


def test_no_call_begins_before_the_first_one_has_ended_and_later_ones_run_side_by_side():
    calls, running, ended = FirstAlone(), threading.Event(), threading.Event()
    second_began = threading.Event()

    def first() -> str:
        running.set()
        assert ended.wait(TIMEOUT_S)
        assert not second_began.is_set(), "the client is not ready for it"
        return "first"

    threads = [threading.Thread(target=calls.run, args=(first,))]
    threads[0].start()
    assert running.wait(TIMEOUT_S)
    threads.append(threading.Thread(target=calls.run, args=(second_began.set,)))
    threads[1].start()
    assert not second_began.wait(0.05)
    ended.set()
    assert second_began.wait(TIMEOUT_S)
    for thread in threads:
        thread.join(TIMEOUT_S)

    together = threading.Barrier(2, timeout=TIMEOUT_S)  # passes only where two calls run at the same time
    other = threading.Thread(target=calls.run, args=(together.wait,))
    other.start()
    calls.run(together.wait)
    other.join(TIMEOUT_S)


def test_after_a_call_that_failed_the_next_one_runs_alone_too():
    calls = FirstAlone()
    with pytest.raises(ValueError, match="no controller"):
        calls.run(fail)
    assert not calls._is_made
    assert calls.run(lambda: 2) == 2 and calls._is_made


def fail() -> None:
    raise ValueError("no controller")
