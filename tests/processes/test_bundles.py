# SPDX-License-Identifier: Apache-2.0
"""Calls of one pass of the event loop, which travel together."""

import asyncio
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from verl_digen.errors import RunStopped
from verl_digen.processes.bundles import Bundles, given, outcomes


async def half(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number // 2


class Actor:
    """An actor whose answers are pickled, as Ray does."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    async def halves(self, numbers: Sequence[int]) -> list[Any]:
        self.calls.append([*numbers])
        await asyncio.sleep(0)
        if 99 in numbers:
            raise ConnectionError("it died")
        return pickle.loads(pickle.dumps(await outcomes([half(number) for number in numbers])))


async def test_every_caller_of_one_pass_has_its_own_answer_or_error():
    actor = Actor()
    bundles = Bundles(actor.halves, size=3, key=lambda number: number >= 10)
    unwanted = bundles.call(4)
    found = await asyncio.gather(*map(bundles.call, (2, 12, 3, 8, 99)), return_exceptions=True)
    unwanted.cancel()
    first, dead, odd, last, also_dead, later = *found, await bundles.call(6)
    assert actor.calls == [[4, 2, 3], [8], [12, 99], [6]] and (first, last, later) == (1, 4, 3)
    assert isinstance(odd, ValueError) and isinstance(odd, RayTaskError) and "3 is odd" in str(odd)
    assert isinstance(dead, ConnectionError) and dead is also_dead


async def test_items_that_fit_into_one_bundle_are_not_cut():
    actor = Actor()
    bundles = Bundles(actor.halves, size=4, cut_by=lambda number: number >= 10)
    await asyncio.gather(*map(bundles.call, (2, 12, 4)))
    await asyncio.gather(*map(bundles.call, (2, 12, 4, 14, 6)))
    assert actor.calls == [[2, 12, 4], [2, 4, 6], [12, 14]]


class Coded(Exception):
    """An exception with more arguments than its message."""

    def __init__(self, code: int, text: str):
        super().__init__(text)


def test_an_error_that_cannot_be_read_back_costs_no_other_answer():
    async def fails() -> None:
        raise Coded(7, "no disk")

    async def ended() -> None:
        raise RunStopped("none is left")

    one, two, three = pickle.loads(pickle.dumps(asyncio.run(outcomes([fails(), half(2), ended()]))))
    assert given(two) == 1
    with pytest.raises(RuntimeError, match="Coded: no disk"):
        given(one)
    with pytest.raises(RunStopped, match="none is left"):
        given(three)
