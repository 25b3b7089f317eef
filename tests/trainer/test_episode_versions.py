# SPDX-License-Identifier: Apache-2.0
"""Episodes under updates at random moments: each has one weight version."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.environments.local import connect, generation_of
from tests.trainer.conducted import GROUP_SIZE, Pools, make_conductor, run
from verl_digen.agent_loop.chunks import GeneratedChunk
from verl_digen.agent_loop.environment import EnvironmentAgentLoop
from verl_digen.config import DigenConfig, EnvironmentConfig, SamplingConfig
from verl_digen.data.rows import loop_columns
from verl_digen.types import Generation, PromptRow, SampleRequest

DIGEN = DigenConfig(
    sampling=SamplingConfig(height_px=64, width_px=64, num_steps=10),
    environment=EnvironmentConfig(path="tests.environments.worlds.Brighter", options={"max_turns": 4}),
)
REPLICAS = {"a": ["a/0", "a/1", "a/2"], "b": ["b/3", "b/4", "b/5"]}
SLOTS = [slot for slots in REPLICAS.values() for slot in slots]


class Replica:
    """Client of the replica of a slot; each turn has the version that the replica has when it generates."""

    def __init__(self, pools: EpisodePools, slot: str):
        self.pools, self.slot, self.digen = pools, slot, DIGEN

    async def generate_sample(self, request: SampleRequest) -> Generation:
        await self.pools.wait()
        return generation_of(DIGEN, request, self.pools.slot_versions.get(self.slot, 0))


class EpisodePools(Pools):
    """Pools whose chunks are episodes, and whose environments answer after a random time.

    Args:
        impatient: weights come to a replica in the middle of its episodes, too.
    """

    def __init__(self, rng: random.Random, *, impatient: bool = False):
        super().__init__(rng)
        self.impatient = impatient
        self.versions: list[set[int]] = []
        """Versions of each episode."""
        self.num_turns = 0

    async def wait(self) -> None:
        """A turn, or an environment's answer."""
        for _ in range(self.rng.randint(0, 12)):
            await asyncio.sleep(0)
        if self.impatient and self.rng.random() < 0.2:
            self.slot_versions |= dict.fromkeys(SLOTS, self.staged)

    async def generate(self, slot: str, chunk: Any) -> GeneratedChunk:
        workers, _ = connect(DIGEN.environment)
        loop = EnvironmentAgentLoop(Replica(self, slot), workers, edits=False)  # type: ignore[arg-type]
        columns = {**loop_columns(PromptRow("a cat", "test", None, uid=chunk.uid)), "global_steps": 1}

        async def play(index: int) -> None:
            episode = await loop.run({"validate": False}, session_id=index, **columns)
            self.versions.append({turn.generation.trajectory.facts.version for turn in episode.played})
            self.num_turns += len(episode.played)
            await self.wait()

        await asyncio.gather(*map(play, chunk.samples))
        return await self._make(chunk)


def played(*, impatient: bool, seed: int) -> EpisodePools:
    pools = EpisodePools(random.Random(seed), impatient=impatient)
    conductor = make_conductor(
        pools,
        num_prompts=5,
        slots=SLOTS,
        slots_of={slot: slots for slots in REPLICAS.values() for slot in slots},
        chunk_size=1,
        max_versions=1,
        fraction=1.0,
    )
    run(conductor, num_batches=10)
    return pools


def test_of_200_episodes_under_updates_at_random_moments_none_is_mixed():
    pools = played(impatient=False, seed=0)
    assert len(pools.versions) >= 10 * 5 * GROUP_SIZE == 200 and pools.num_turns > 2 * len(pools.versions)
    assert len({version for own in pools.versions for version in own}) >= 9, "updates came in between"
    assert sum(len(own) > 1 for own in pools.versions) == 0


@pytest.mark.parametrize("seed", range(2))
def test_weights_that_come_in_the_middle_of_episodes_would_be_seen(seed):
    assert sum(len(own) > 1 for own in played(impatient=True, seed=seed).versions) > 0
