# SPDX-License-Identifier: Apache-2.0
"""The trainer's pool against futures in place of Ray references."""

import asyncio
import logging

from tests.trainer.direct import Direct
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.trainer.updates import TrainerRanks


class Ranks:
    """Answers `abort` with these futures."""

    def __init__(self, *outcomes):
        self.outcomes = outcomes

    def abort(self):
        return [asyncio.ensure_future(outcome()) for outcome in self.outcomes]


async def answers():
    return None


async def fails():
    raise RuntimeError("abort needs an open logical batch")


def abort(*outcomes):
    asyncio.run(TrainerRanks(Direct(Ranks(*outcomes))).abort())


def test_an_abort_waits_for_every_rank_and_hides_no_earlier_error(caplog):
    with caplog.at_level(logging.ERROR):
        abort(answers, fails)
    assert "rank 1 of the trainer could not forget the open batch: RuntimeError: abort needs" in caplog.text


class Accumulating:
    """Three ranks that keep what they are sent."""

    def __init__(self):
        self.sent = []

    def accumulate(self, fragment):
        self.sent += [fragment] * 3
        return [asyncio.ensure_future(counts()) for _ in range(3)]

    def evaluate(self, fragments, partition):
        self.sent += [fragments] * 3
        return [asyncio.ensure_future(nothing()) for _ in range(3)]


async def counts():
    return {"accumulate_s": 0.5}


async def nothing():
    return {}


async def test_a_fragment_is_stored_once_and_every_rank_is_sent_the_reference():
    stored, group = [], Accumulating()

    def put(value):
        stored.append(value)
        return f"reference {len(stored)}"

    ranks, fragment = TrainerRanks(Direct(group), put), FragmentSpec("f0", ())
    await ranks.accumulate(fragment)
    await ranks.evaluate([fragment])
    assert stored == [fragment, [fragment]] and ranks.compute_s >= 0.5
    assert group.sent == ["reference 1"] * 3 + ["reference 2"] * 3
