# SPDX-License-Identifier: Apache-2.0
"""Samples of the next fragment, fetched while this one's last tile runs: from a store that answers when it may."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict
from torch import Tensor

from tests.engine.harness import (
    assert_equal,
    begin,
    fragment,
    make_batch,
    make_engine,
    num_rows_of,
    read_samples,
    samples_of,
    stepped_gradients,
)
from tests.engine.test_arrival import REWARDS_OF_SIX, WAIT_S
from verl_digen.algorithms.metric import numbers
from verl_digen.engine.ahead import FetchAhead
from verl_digen.engine.arrival import Arrival
from verl_digen.engine.fragment import FragmentSample, FragmentSpec, Upcoming
from verl_digen.engine.rows import Samples


class Store:
    """Samples of a batch, and the announcement."""

    def __init__(self, batch: TensorDict):
        self.batch = batch
        self.upcoming: Upcoming | None = None
        self.asked: list[list[str]] = []
        """Keys of each fetch, those ahead too."""
        self.called: list[str] = []
        """Keys in the order in which their columns came."""
        self.gate = threading.Event()
        """Lets columns come."""
        self.gate.set()
        self.broken: set[str] = set()
        """Keys whose conditions fail once."""

    def announced(self) -> Upcoming | None:
        return self.upcoming

    def fetch(self, samples: Sequence[FragmentSample]) -> Samples:
        keys = [sample.key for sample in samples]
        self.asked.append(keys)
        if self.broken & {*keys}:
            self.broken.clear()
            raise OSError("connection reset")
        whole = read_samples(self.batch, samples)

        def columns(wanted: Sequence[str]) -> Mapping[str, Sequence[Tensor]]:
            assert self.gate.wait(WAIT_S)
            self.called += wanted
            return {name: [column[keys.index(key)] for key in wanted] for name, column in whole.columns.items()}

        arrival = Arrival(keys, whole.columns, columns)
        return replace(whole, columns=arrival.columns, arrival=arrival)


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image)


@pytest.fixture
def store(batch: TensorDict) -> Iterator[Store]:
    found = Store(batch)
    yield found
    found.gate.set()
    assert not threads(), "no thread outlives its batch"


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("digen-")]


def first(store: Store) -> tuple[FetchAhead, dict[str, list[FragmentSample]]]:
    return FetchAhead(store.fetch, store.announced), samples_of(store.batch, REWARDS_OF_SIX)


def everything(samples: Sequence[FragmentSample]) -> Sequence[FragmentSample]:
    return samples


def looked(ahead: FetchAhead, after: str, own: Callable[..., Any] = everything) -> None:
    """Look, and wait until what is announced has been read and its fetch has begun."""
    read, announced = threading.Event(), ahead._announced
    readings = itertools.count()

    def reading() -> Upcoming | None:
        if next(readings):  # the second one: the first is dealt with
            read.set()
        return announced()

    ahead._announced = reading
    ahead.look(after, own)
    assert ahead._looking is not None
    while ahead._looking.is_alive() and not read.wait(0.01):
        pass
    ahead._announced = announced


def test_announced_samples_are_fetched_once_and_are_there_when_they_train(store: Store):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g1"]))
    looked(ahead, "f0")
    scored = [replace(sample, reward=7.0) for sample in groups["g1"]]
    samples = ahead(scored)
    assert samples.described == scored, "the fragment that trains says what trains"
    assert [len(column) for column in samples.columns.values()] == [len(scored)] * len(samples.columns)
    for sample, latents in zip(scored, samples.columns["latents"], strict=True):
        assert latents.equal(store.batch["latents"][int(sample.key)])
    keys = [sample.key for sample in scored]
    assert store.asked == [keys] and sorted(store.called) == keys
    assert (ahead.num_ahead, ahead.num_unused) == (len(keys), 0)
    samples.close()
    ahead.close()


def test_a_rank_fetches_its_own_samples_alone(store: Store):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g1"]))
    looked(ahead, "f0", lambda samples: samples[1:])
    assert store.asked == [[sample.key for sample in groups["g1"][1:]]]
    ahead.close()


def test_what_is_announced_after_another_fragment_is_not_fetched(store: Store):
    ahead, groups = first(store)
    for upcoming in (None, Upcoming("f0", tuple(groups["g1"]))):
        store.upcoming = upcoming
        looked(ahead, "f1")
        ahead(groups["g0"]).close()
    assert store.asked == [[sample.key for sample in groups["g0"]]] * 2
    assert (ahead.num_ahead, ahead.num_unused) == (0, 0)
    ahead.close()


def test_other_samples_than_announced_do_not_wait_for_them_and_free_their_memory(store: Store):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g1"]))
    looked(ahead, "f0")
    announced = ahead._found
    assert announced is not None and announced.arrival is not None
    announced.arrival.wait_for(0)
    store.gate.clear()
    other = ahead([*groups["g0"], *groups["g1"]])
    assert announced.arrival._found == {} and ahead.num_unused == len(groups["g1"])
    store.gate.set()
    assert other.columns["latents"][0].equal(store.batch["latents"][0])
    other.close()
    ahead.close()


def test_a_group_that_completes_while_the_tile_runs_is_fetched_too(store: Store):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g0"]))
    looked(ahead, "f0")
    both = (*groups["g0"], *groups["g1"])
    store.upcoming = Upcoming("f0", both)
    while len(store.asked) < 2:
        threading.Event().wait(0.01)
    ahead.rest()
    samples = ahead(both)
    assert samples.columns["latents"][len(both) - 1].equal(store.batch["latents"][int(both[-1].key)])
    assert (ahead.num_ahead, ahead.num_unused) == (len(both), len(groups["g0"]))
    samples.close()
    ahead.close()


def test_nothing_is_read_once_the_last_tile_has_run(store: Store):
    ahead, _ = first(store)
    looked(ahead, "f0")
    ahead.rest()
    assert ahead._looking is not None
    ahead._looking.join(WAIT_S)
    assert not ahead._looking.is_alive()
    ahead.close()


def test_a_fetch_that_fails_ahead_is_made_again(store: Store, caplog: pytest.LogCaptureFixture):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g1"]))
    store.broken = {groups["g1"][0].key}
    looked(ahead, "f0")
    samples = ahead(groups["g1"])
    assert samples.columns["latents"][0].equal(store.batch["latents"][int(groups["g1"][0].key)])
    assert "nothing is fetched ahead of the fragment after f0: connection reset" in caplog.text
    samples.close()
    ahead.close()


def test_a_close_ends_what_is_fetched_ahead(store: Store):
    ahead, groups = first(store)
    store.upcoming = Upcoming("f0", tuple(groups["g1"]))
    store.gate.clear()
    looked(ahead, "f0")
    closing = threading.Thread(target=ahead.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive(), "it waits for the call in flight"
    store.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive() and not threads()
    assert len(store.called) == 1 < len(groups["g1"]), "the others are not fetched"
    assert ahead(groups["g0"]).arrival is not None
    ahead.look("f0", everything)
    assert ahead._looking is None, "nothing is fetched ahead in a closed batch"


TILES: dict[str, Any] = {"tsp": {"samples_per_tile": 1, "steps_per_tile": 1}, "advantage": {"scale": "group"}}


class Told(Store):
    """A store in which fragment by fragment is announced, as it says."""

    def __init__(self, batch: TensorDict, announcements: Mapping[str, FragmentSpec]):
        super().__init__(batch)
        self.announcements = announcements
        self.after = ""

    def announced(self) -> Upcoming | None:
        told = self.announcements.get(self.after)
        return None if told is None else Upcoming(self.after, told.samples)


@pytest.mark.parametrize("said", ["right", "wrong", "old", "failing"])
def test_gradients_are_bitwise_those_without_announcements(
    one_rank: None, tiny_qwen_image: Path, batch: TensorDict, said: str
):
    engine, expected = (make_engine(tiny_qwen_image, digen=TILES) for _ in range(2))
    groups = samples_of(batch, REWARDS_OF_SIX)
    order = list(groups)
    following = dict(zip(order, [*order[1:], order[0]] if said != "wrong" else order[::-1], strict=True))
    store = Told(batch, {uid: fragment(groups, after) for uid, after in following.items()})
    engine.begin(len(REWARDS_OF_SIX), num_rows_of(groups), FetchAhead(store.fetch, store.announced))
    begin(expected, batch, REWARDS_OF_SIX)
    for uid in order:
        store.after = "elsewhere" if said == "old" else uid
        if said == "failing":
            store.broken = {sample.key for sample in groups[following[uid]]}
        engine.accumulate(fragment(groups, uid))
        store.broken = set()
        expected.accumulate(fragment(groups, uid))
    found = []
    for one in (engine, expected):
        with stepped_gradients(one) as gradient:
            metrics = numbers(one.commit()["metrics"])
        found.append(gradient)
        if one is engine:
            counts = metrics["num_ahead_samples"], metrics["num_unused_samples"]
    assert_equal(*found)
    assert not threads()
    num_later = sum(len(groups[uid]) for uid in order[1:])
    if said == "right":
        assert counts == (num_later, len(groups[order[0]])), "the last announcement is of a group that has trained"
    elif said in ("old", "failing"):
        assert counts == (0, 0)


def test_an_abort_ends_what_is_fetched_ahead(one_rank: None, tiny_qwen_image: Path, batch: TensorDict):
    engine, groups = make_engine(tiny_qwen_image, digen=TILES), samples_of(batch, REWARDS_OF_SIX)
    store = Told(batch, {"g0": fragment(groups, "g1")})
    store.after = "g0"
    engine.begin(len(REWARDS_OF_SIX), num_rows_of(groups), FetchAhead(store.fetch, store.announced))
    engine.accumulate(fragment(groups, "g0"))
    engine.abort()
    assert not threads() and store.asked == [[sample.key for sample in groups[uid]] for uid in ("g0", "g1")]
