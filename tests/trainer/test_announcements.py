# SPDX-License-Identifier: Apache-2.0
"""Announcements of what trains next, by the conductor with fake pools."""

from __future__ import annotations

import random

import pytest

from tests.trainer.conducted import Pools, make_conductor, run


class Listening(Pools):
    """Notes what the planner would train next when something is announced, and what trains."""

    def __init__(self, rng=None):
        super().__init__(rng)
        self.training: list[tuple[int, tuple[str, ...]]] = []
        self.told: dict[int, tuple[str, ...]] = {}

    async def accumulate(self, fragment, groups):
        self.training.append((fragment.id, fragment.uids))
        await super().accumulate(fragment, groups)
        for _ in range(self.rng.randint(0, 40) if self.rng else 40):
            await self._pause()

    async def announce(self, after, groups):
        await super().announce(after, groups)
        assert after == self.training[-1][0], "of the fragment that trains now"
        assert not {*groups} & {*self.trained}, "of groups that have not trained"
        self.told[after] = tuple(groups)


def test_groups_that_complete_while_the_trainer_trains_are_announced_in_the_order_in_which_they_train():
    pools = Listening()
    run(make_conductor(pools, num_prompts=6, max_groups_per_fragment=2))
    following = {before: uids for (before, _), (_, uids) in zip(pools.training, pools.training[1:], strict=False)}
    assert pools.told and all(following[after] == uids for after, uids in pools.told.items())


@pytest.mark.parametrize("seed", range(30))
def test_an_announcement_is_the_start_of_what_trains_next_whatever_the_order_of_events(seed: int):
    pools = Listening(random.Random(seed))
    run(make_conductor(pools, num_prompts=6, max_groups_per_fragment=3), num_batches=2)
    following = {before: uids for (before, _), (_, uids) in zip(pools.training, pools.training[1:], strict=False)}
    for after, uids in pools.told.items():
        assert {*uids} <= {*following[after]} or len(following[after]) == 3
