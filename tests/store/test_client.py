# SPDX-License-Identifier: Apache-2.0
"""Calls of TransferQueue: the first one of a process runs alone, and puts of one pass of the event loop are one."""

import asyncio
import threading

import pytest
import ray
import torch
import transfer_queue as tq

from verl_digen.store import client
from verl_digen.store.client import StoredRow, processes, put

TIMEOUT_S = 60


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch):
    """Fetches nothing, by a call of TransferQueue that does what is given, in a process that has made none."""
    monkeypatch.setattr(client, "_MADE", threading.Event())
    monkeypatch.setattr(tq, "kv_batch_get", lambda keys, **given: (given["select_fields"][0](), {})[1])
    return lambda call: client.fetch_columns("train", (), (call,))


def test_no_call_begins_before_the_first_one_has_ended_and_later_ones_run_side_by_side(fetch):
    running, ended, second_began = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        running.set()
        assert ended.wait(TIMEOUT_S)
        assert not second_began.is_set(), "the client is not ready for it"

    threads = [threading.Thread(target=fetch, args=(first,))]
    threads[0].start()
    assert running.wait(TIMEOUT_S)
    threads.append(threading.Thread(target=fetch, args=(second_began.set,)))
    threads[1].start()
    assert not second_began.wait(0.05)
    ended.set()
    assert second_began.wait(TIMEOUT_S)
    for thread in threads:
        thread.join(TIMEOUT_S)

    together = threading.Barrier(2, timeout=TIMEOUT_S)  # passes only where two calls run at the same time
    other = threading.Thread(target=fetch, args=(together.wait,))
    other.start()
    fetch(together.wait)
    other.join(TIMEOUT_S)


def test_after_a_call_that_failed_the_next_one_runs_alone_too(fetch):
    with pytest.raises(ValueError, match="no controller"):
        fetch(fail)
    assert not client._MADE.is_set()
    fetch(lambda: None)
    assert client._MADE.is_set()


def fail() -> None:
    raise ValueError("no controller")


def test_puts_of_one_pass_are_one_call_of_each_partition_and_shape(monkeypatch: pytest.MonkeyPatch):
    calls = []

    async def store(keys, partition_id, fields, tags):
        calls.append(
            (partition_id, dict(zip(keys, tags, strict=True)), None if fields is None else fields["x"].tolist())
        )
        if partition_id == "full":
            raise RuntimeError("no memory is left")

    async def run():
        rows = {
            key: StoredRow({"tag": key}, {"x": torch.tensor(x)}) for key, x in (("a", [1]), ("b", [2]), ("c", [3, 4]))
        }
        puts = [put("train", {key: row}) for key, row in rows.items()]
        puts += [
            put("train", {"a": StoredRow({"is": "status"})}),
            put("full", {"d": StoredRow({})}),
            put("full", {"e": StoredRow({})}),
        ]
        return await asyncio.gather(*puts, return_exceptions=True)

    monkeypatch.setattr(tq, "async_kv_batch_put", store)
    for _ in range(2):  # in two event loops
        outcomes = asyncio.run(run())
        assert outcomes[:4] == [None] * 4 and [str(error) for error in outcomes[4:]] == ["no memory is left"] * 2
        assert calls == [
            ("train", {"a": {"tag": "a"}, "b": {"tag": "b"}}, [[1], [2]]),
            ("train", {"c": {"tag": "c"}}, [[3, 4]]),
            ("train", {"a": {"is": "status"}}, None),
            ("full", {"d": {}, "e": {}}, None),
        ]
        calls.clear()


def test_the_controller_and_each_storage_unit_can_be_watched(queue):
    found = processes()
    assert sorted(found) == ["TransferQueue's controller", "TransferQueue's storage unit 0"]
    assert len(ray.get([process.__ray_ready__.remote() for process in found.values()])) == 2
