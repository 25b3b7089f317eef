# SPDX-License-Identifier: Apache-2.0
"""The trainer's pool against futures in place of Ray references."""

import asyncio
import logging

from verl_digen.trainer.ranks import TrainerRanks


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
    asyncio.run(TrainerRanks(Ranks(*outcomes)).abort())


def test_an_abort_waits_for_every_rank_and_hides_no_earlier_error(caplog):
    with caplog.at_level(logging.ERROR):
        abort(answers, fails)
    assert "rank 1 of the trainer could not forget the open batch: RuntimeError: abort needs" in caplog.text
