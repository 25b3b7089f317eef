# SPDX-License-Identifier: Apache-2.0
"""One run as data: sizes, techniques, number of batches, faults. Drawn from a seed, or written by hand.

A failing world is shrunk to a smaller one and printed as the call that makes it; tests keep it in that form.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tests.chaos.faults import AGENT, ENGINE, KINDS, QUEUE, RANK, REWARD, SERVER, Fault, Kind, draw_faults
from verl_digen.config import DigenConfig, RolloutConfig, SamplingConfig
from verl_digen.schedulers.rules import GapConfig, QueueConfig, StalenessConfig, TagConfig

MANY = 50
"""Refills that a run never uses up, so that a batch is whole."""


@dataclass(frozen=True)
class World:
    """Example: World(seed=1, num_batches=2, faults=(Fault("server 0", "generate_all", 0, Kind.DIES_BEFORE),))"""

    seed: int = 0
    """Seed of all durations."""
    num_replicas: int = 2
    slots_per_replica: int = 1
    num_agents: int = 1
    num_rewards: int = 1
    num_ranks: int = 1
    num_prompts: int = 1
    group_size: int = 2
    num_batches: int = 1
    is_pipelined: bool = True
    chunk_size: int | str = "auto"
    replicate_prompts: bool = True
    max_fragment: int = 4
    assist: str = "off"
    max_versions: int = 0
    fraction: float = 1.0
    extra_prompts: int = 0
    drop_zero_spread: bool = False
    batch_size: int = 8
    """Samples that a replica denoises at once."""
    compares: bool = False
    """Also a reward of whole groups, of weight 0."""
    validates: tuple[int, ...] = ()
    """Steps after which there is a validation."""
    saves: tuple[int, ...] = ()
    """Steps after which there is a checkpoint."""
    save_s: float = 3.0
    """Virtual seconds that a checkpoint takes."""
    faults: tuple[Fault, ...] = ()

    def __repr__(self) -> str:
        """Source text with only the fields that differ from the defaults."""
        given = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default)
        return f"World({', '.join(given)})"

    def with_faults(self, *faults: Fault) -> World:
        """A copy of the world with other faults."""
        return replace(self, faults=faults)

    def processes(self) -> list[str]:
        """Names of all processes that may fail."""
        counts = {
            SERVER: self.num_replicas,
            ENGINE: self.num_replicas,
            AGENT: self.num_agents,
            REWARD: self.num_rewards,
            RANK: self.num_ranks,
            QUEUE: 1,
        }
        return [f"{kind} {number}" for kind, count in counts.items() for number in range(count)]

    def digen(self) -> DigenConfig:
        """The run's `digen:` section."""
        return DigenConfig(
            sampling=SamplingConfig(height_px=16, width_px=16, num_steps=10, val_num_steps=2),
            gap=GapConfig(
                enable=self.is_pipelined,
                chunk_size=self.chunk_size,
                slots_per_replica=self.slots_per_replica,
                max_groups_per_fragment=self.max_fragment,
            ),
            queue=QueueConfig(
                replicate_prompts=self.replicate_prompts,
                extra_prompts=self.extra_prompts,
                drop_zero_spread=self.drop_zero_spread,
                max_sample_refills=MANY,
            ),
            rollout=RolloutConfig(max_batch_size=self.batch_size),
            tag=TagConfig(policy=self.assist),
            staleness=StalenessConfig(max_versions=self.max_versions, fraction=self.fraction),
            max_refills_per_step=MANY,
            num_logged_images=0,
            num_logged_groups=0,
        )


def draw_world(seed: int, kinds: Sequence[Kind] = KINDS) -> World:
    """The world of a seed, with faults of these kinds."""
    rng = random.Random(seed)
    num_batches, group_size = rng.choice((1, 2, 2, 3)), rng.choice((1, 2, 2, 3))
    world = World(
        seed=seed,
        num_replicas=rng.randint(1, 3),
        slots_per_replica=rng.choice((1, 1, 2, 3)),
        num_agents=rng.randint(1, 2),
        num_rewards=rng.randint(1, 2),
        num_ranks=rng.randint(1, 2),
        num_prompts=rng.choice((1, 2, 2, 3)),
        group_size=group_size,
        num_batches=num_batches,
        is_pipelined=rng.random() < 0.85,
        chunk_size=rng.choice(("auto", "auto", 1, 2)),
        replicate_prompts=rng.random() < 0.85,
        max_fragment=rng.randint(1, 4),
        assist=rng.choice(("off", "bts", "always")),
        max_versions=rng.choice((0, 0, 1, 1, 2, 3)),
        fraction=rng.choice((0.3, 0.5, 1.0)),
        extra_prompts=rng.choice((0, 0, 0, 2)),
        drop_zero_spread=group_size > 1 and rng.random() < 0.2,
        batch_size=rng.choice((1, 2, 8)),
        validates=tuple(step for step in range(1, num_batches + 1) if rng.random() < 0.2),
    )
    world = replace(world, faults=draw_faults(rng, world.processes(), kinds))
    world = replace(world, compares=rng.random() < 0.5)
    return replace(world, saves=tuple(step for step in range(1, num_batches + 1) if rng.random() < 0.3))


def smaller(world: World) -> Iterator[World]:
    """Worlds that are simpler in one respect, the greatest simplification first."""
    for index in range(len(world.faults)):
        yield replace(world, faults=world.faults[:index] + world.faults[index + 1 :])
    plain = World()
    changes: list[dict[str, Any]] = [{"validates": ()}, {"saves": ()}, {"assist": "off"}, {"max_versions": 0}]
    changes += [
        {f.name: f.default}
        for f in fields(World)
        if f.name
        not in ("seed", "faults", "validates", "saves", "num_batches", "num_replicas", "num_prompts", "group_size")
        and getattr(world, f.name) != getattr(plain, f.name)
    ]
    for name in ("num_batches", "num_prompts", "group_size", "num_replicas"):
        if getattr(world, name) > 1:
            changes.append({name: getattr(world, name) - 1})
    for change in changes:
        candidate = replace(world, **change)
        if candidate != world:
            yield candidate
