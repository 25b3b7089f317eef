# SPDX-License-Identifier: Apache-2.0
"""Samples that arrive in the background, from a store that answers when the test lets it."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.engine.harness import (
    assert_equal,
    begin,
    described,
    fragment,
    make_batch,
    make_engine,
    num_rows_of,
    read_samples,
    samples_of,
    stepped_gradients,
)
from verl_digen.algorithms.rows import numbers
from verl_digen.engine import rows
from verl_digen.engine.arrival import THREAD, Arrival
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.rows import ForwardPoints, Samples
from verl_digen.types import CleanRecord

KEYS = [f"s{number}" for number in range(20)]
REWARDS_OF_SIX = [0.1, 0.7, 0.4, 0.9, 0.2, 0.3]
BEGUN: list[Arrival] = []
"""Arrivals of a test, closed when it has ended."""
WAIT_S = 60.0
"""Bound of a wait that a broken implementation would never end."""


class Store:
    """Calls of a fetch, each of which waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.began = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.broken = ""
        """Key whose fetch fails."""

    def __call__(self, keys: Sequence[str]) -> Mapping[str, Sequence[Tensor]]:
        self.calls.append(list(keys))
        self.began.release()
        assert self.gate.acquire(timeout=WAIT_S)
        if self.broken in keys:
            raise OSError("connection reset")
        return {"clean": [torch.tensor(float(key[1:])) for key in keys], "sigmas": [torch.zeros(1) for _ in keys]}

    def answer(self, num_calls: int = 1) -> None:
        for _ in range(num_calls):
            self.gate.release()

    def wait_for_calls(self, num_calls: int) -> None:
        for _ in range(num_calls):
            assert self.began.acquire(timeout=WAIT_S)


@pytest.fixture
def store() -> Iterator[Store]:
    found = Store()
    yield found
    found.answer(100)  # no thread of a failed test waits for ever
    while BEGUN:
        BEGUN.pop().close()
    assert not threads()


def threads() -> list[threading.Thread]:
    """Running threads of fetches, when those that end have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD):
            thread.join(WAIT_S)
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def arrival(store: Callable[[Sequence[str]], Mapping[str, Sequence[Tensor]]]) -> Arrival:
    BEGUN.append(Arrival(KEYS, ("clean", "sigmas"), store))
    return BEGUN[-1]


def test_the_first_tile_does_not_wait_for_the_samples_of_later_ones(store: Store):
    fetched = arrival(store)
    fetched.request([[3, 4], [4, 5], [6], [7], [8], [9], [10], [11], [12]])
    store.wait_for_calls(1)
    store.answer()
    assert fetched.columns["clean"][3] == 3.0 and fetched.columns["clean"][4] == 4.0
    store.wait_for_calls(1)
    assert store.calls == [["s3", "s4"], ["s5"]], "one call at a time, of the next tile"
    store.answer(4)
    assert fetched.columns["clean"][12] == 12.0
    assert store.calls[2:] == [["s6", "s7"], ["s8", "s9", "s10", "s11"], ["s12"]], "of ever more tiles"
    assert fetched.waited_s > 0


def test_a_sample_that_is_read_before_it_was_requested_comes_and_none_comes_twice(store: Store):
    fetched = arrival(store)
    fetched.request([[0], [1], [2]])
    store.wait_for_calls(1)
    store.answer(100)
    assert fetched.columns["clean"][9] == 9.0
    assert [float(value) for value in fetched.columns["clean"]] == [float(number) for number in range(20)]
    assert sorted(key for call in store.calls for key in call) == sorted(KEYS)
    assert fetched.columns["clean"][-1] == 19.0


def test_an_error_reaches_the_reader_of_each_sample_of_its_call(store: Store):
    store.broken = "s2"
    fetched = arrival(store)
    fetched.request([[0], [1], [2], [3]])
    store.answer(100)
    assert fetched.columns["clean"][0] == 0.0
    for number in (2, 3):
        reason = rf"s{number} cannot train: the rows of s2, s3 could not be .* \(connection reset\)"
        with pytest.raises(RuntimeError, match=reason):
            fetched.columns["clean"][number]


def test_no_fetch_outlives_a_close(store: Store):
    fetched = arrival(store)
    fetched.request([[0], [1], [2]])
    store.wait_for_calls(1)
    closing = threading.Thread(target=fetched.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "it waits for the call in flight"
    store.answer()
    closing.join(WAIT_S)
    assert not closing.is_alive() and not threads()
    assert store.calls == [["s0"]], "what was requested is not fetched any more"
    with pytest.raises(RuntimeError, match="s5 is read after its batch was closed"):
        fetched.columns["clean"][5]
    assert store.calls == [["s0"]]


@pytest.mark.parametrize("num_samples", [rows.AT_ONCE, rows.AT_ONCE + 1])
def test_few_samples_come_by_one_call_beside_their_conditions_and_many_tile_by_tile(
    store: Store, monkeypatch: pytest.MonkeyPatch, num_samples: int
):
    def fetch_conditions(keys: Sequence[str]) -> dict:
        if num_samples <= rows.AT_ONCE:
            store.wait_for_calls(1)  # the columns are under way already
        return dict.fromkeys(keys, ({"embeds": torch.zeros(1, 1)}, None))

    monkeypatch.setattr(rows, "fetch_columns", lambda partition, keys, names: store(keys))
    monkeypatch.setattr(rows, "fetch_conditions", fetch_conditions)
    samples = [described(key, "g", 0.0, 1) for key in KEYS[:num_samples]]
    found = rows.fetch_samples(ForwardPoints(0), "train", samples)
    assert set(found.columns) == set(CleanRecord.COLUMNS)
    found.request([[0], [1]])
    store.answer(100)
    assert found.columns["clean"][1] == 1.0
    assert store.calls == ([KEYS[:8]] if num_samples == 8 else [["s0"], ["s1"]])
    found.close()


def test_conditions_that_are_missing_end_the_fetch_of_columns(store: Store, monkeypatch: pytest.MonkeyPatch):
    def fetch_conditions(keys: Sequence[str]) -> dict:
        store.wait_for_calls(1)
        store.answer()
        raise RuntimeError("2 prompts are being trained but 1 have conditions")

    monkeypatch.setattr(rows, "fetch_columns", lambda partition, keys, names: store(keys))
    monkeypatch.setattr(rows, "fetch_conditions", fetch_conditions)
    with pytest.raises(RuntimeError, match="1 have conditions"):
        rows.fetch_samples(ForwardPoints(0), "train", [described(key, "g", 0.0, 1) for key in KEYS[:3]])
    assert not threads()


def test_a_batch_whose_fetch_fails_between_two_tiles_is_aborted_and_trains_again(one_rank: None, tiny_qwen_image: Path):
    """Tiles of one row; the store fails for the sample of the last ones, after others have trained."""
    batch = make_batch(tiny_qwen_image)
    tiles = {"tsp": {"samples_per_tile": 1, "steps_per_tile": 1}}
    engine, expected = (make_engine(tiny_qwen_image, digen=tiles) for _ in range(2))
    broken, calls = {"5"}, []

    def fetch(asked: Sequence[FragmentSample]) -> Samples:
        whole = read_samples(batch, asked)
        places = {sample.key: place for place, sample in enumerate(asked)}

        def columns(keys: Sequence[str]) -> Mapping[str, Sequence[Tensor]]:
            calls.append(list(keys))
            if broken & {*keys}:
                raise OSError("connection reset")
            return {name: [column[places[key]] for key in keys] for name, column in whole.columns.items()}

        found = Arrival([sample.key for sample in asked], whole.columns, columns)
        return replace(whole, columns=found.columns, arrival=found)

    groups = samples_of(batch, REWARDS_OF_SIX)
    trained = []
    for attempt in range(2):
        engine.begin(6, num_rows_of(groups), fetch)
        if attempt == 0:
            with pytest.raises(RuntimeError, match="the rows of 3, 4, 5 could not be fetched"):
                engine.accumulate(fragment(groups, "g0", "g1"))
            assert len(calls) > 1, "others were fetched, and trained, before"
            engine.abort()
            assert not threads()
            broken.clear()
        else:
            engine.accumulate(fragment(groups, "g0", "g1"))
            with stepped_gradients(engine) as gradient:
                metrics = numbers(engine.commit()["metrics"])
            trained.append(dict(gradient))
    assert metrics["fetch_wait_s"] >= 0 and not threads()
    begin(expected, batch, REWARDS_OF_SIX)
    expected.accumulate(fragment(groups, "g0", "g1"))
    with stepped_gradients(expected) as gradient:
        expected.commit()
    assert_equal(trained[0], gradient)
