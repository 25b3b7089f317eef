# SPDX-License-Identifier: Apache-2.0
"""Splits of devices into trainer and generator: pools as a person types them, their places on the nodes of a cluster,
the overrides that ask for them, and the search of the best split, by simulation. Pure.

verl gives a pool as nodes x devices per node, and Ray puts each of these nodes on one node of the cluster; several may
share one. Shapes are placed by first fit, the largest first: a placement that is found can be made, but of two odd
shapes one that could be made may be missed.

Invariants (tests/simulate/test_splits.py): what is placed on a node is never more than it has; what is found was among
the splits given; up to `GRID_POINTS` of a family it is the best of them.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import TypeVar

from verl_digen.hardware.devices import PEAK_TFLOPS, Pool
from verl_digen.require import require, require_one_of
from verl_digen.tools.simulate.cluster import Split, run_split
from verl_digen.tools.simulate.profile import Profile

NODE_SIZE = 8
"""Devices of a node where nothing says how many it has."""

POOL_KEYS = (
    *("trainer.nnodes", "trainer.n_gpus_per_node"),
    *("actor_rollout_ref.rollout.nnodes", "actor_rollout_ref.rollout.n_gpus_per_node"),
)
"""Keys of the trainer's pool, and of the replicas'."""


@dataclass(frozen=True)
class Shape:
    """A pool as verl's config gives it."""

    nnodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        return self.nnodes * self.per_node


def nodes_of(num_devices: int, node_size: int = NODE_SIZE) -> list[int]:
    """Devices of each node: full ones, and one for the rest; 20 are [8, 8, 4]."""
    full, rest = divmod(num_devices, node_size)
    return [node_size] * full + ([rest] if rest else [])


def pooled_nodes(pools: Iterable[Pool], per_node: Iterable[int]) -> dict[str, list[int]]:
    """Nodes of each type of device: the pools put together, on nodes of `NODE_SIZE` or of the largest `per_node`."""
    size = max((NODE_SIZE, *per_node))
    numbers: dict[str, int] = {}
    for pool in pools:
        numbers[pool.device] = numbers.get(pool.device, 0) + pool.num_devices
    return {device: nodes_of(number, size) for device, number in numbers.items()}


def arrange(nodes: Mapping[str, Sequence[int]], trainer: Pool, generator: Pool) -> tuple[Shape, Shape] | None:
    """Shapes of both pools that fit together on the nodes, given as device type -> devices of each; None if there are
    none.

    Example:
        arrange({"H800": [8, 8]}, Pool(4, "H800"), Pool(12, "H800"))   # Shape(1, 4), Shape(3, 4)
    """
    for of_trainer in _shapes(trainer.num_devices, max(nodes[trainer.device])):
        for of_generator in _shapes(generator.num_devices, max(nodes[generator.device])):
            wanted: dict[str, list[int]] = {trainer.device: [of_trainer.per_node] * of_trainer.nnodes}
            wanted.setdefault(generator.device, []).extend([of_generator.per_node] * of_generator.nnodes)
            if all(_fits(nodes[device], sizes) for device, sizes in wanted.items()):
                return of_trainer, of_generator
    return None


def _shapes(num_devices: int, largest: int) -> list[Shape]:
    """Shapes of a pool, fewest nodes first."""
    sizes = range(min(largest, num_devices), 0, -1)
    return [Shape(num_devices // size, size) for size in sizes if num_devices % size == 0]


def _fits(nodes: Sequence[int], sizes: Sequence[int]) -> bool:
    free = sorted(nodes)  # the fullest that still fits: small nodes first
    for size in sorted(sizes, reverse=True):
        fitting = next((number for number, left in enumerate(free) if left >= size), None)
        if fitting is None:
            return False
        free[fitting] -= size
    return True


def pool_overrides(*shapes: Shape) -> list[str]:
    """Overrides that give verl's main a trainer and replicas of these shapes; of one shape alone a trainer."""
    numbers = (number for shape in shapes for number in (shape.nnodes, shape.per_node))
    return [f"{key}={number}" for key, number in zip(POOL_KEYS, numbers, strict=False)]


def type_overrides(trainer: Pool, generator: Pool) -> list[str]:
    """Overrides that say which type of device each pool takes; none where both have the same."""
    if trainer.device == generator.device:
        return []
    return [
        f"digen.placement.trainer_accelerator={trainer.device}",
        f"digen.placement.generator_accelerator={generator.device}",
    ]


def parse_pool(option: str, text: str, *, default_device: str) -> Pool:
    """Parse `16` or `16xH20`. Raises ValueError, which names `option`, if the text is not a pool."""
    number, _, device = text.partition("x")
    is_pool = number.isdecimal() and int(number) >= 1 and text != f"{number}x"
    require(is_pool, f"{option} must be a number of devices >= 1, or e.g. 16xH20", text, "write a number")
    require_one_of(f"the device type of {option}", device := device or default_device, PEAK_TFLOPS)
    return Pool(int(number), device)


WORTH_CHANGING = 1.05
"""Speed-up from which another placement is advised, and then stale samples: both are more to set up and to watch, and
the simulation knows no variance."""

SEARCH_STEPS = 10
"""Maximum number of simulated steps per split tried; the best one is then simulated for all steps."""

GRID_POINTS = 9
"""Number of splits tried before the search narrows down on the best one's neighbours."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Limits:
    """Rules of a run's config about the sizes of its pools."""

    fsdp_size: int = -1
    """Ranks that shard the weights; -1: all."""
    sequence_parallel: int = 1
    """Ranks that share a row."""
    replica_devices: int = 1

    def allows_trainer(self, num_ranks: int) -> bool:
        """True if a trainer may have this number of ranks."""
        shards = self.fsdp_size in (-1, 0) or self.fsdp_size >= num_ranks or num_ranks % self.fsdp_size == 0
        return shards and num_ranks % self.sequence_parallel == 0


@dataclass(frozen=True)
class Placed:
    """A split and its shapes on the nodes."""

    split: Split
    trainer: Shape
    generator: Shape


def placed_splits(nodes: Mapping[str, Sequence[int]], limits: Limits) -> list[list[Placed]]:
    """Families of splits that the limits and the nodes (device type, one or two -> devices of each) allow, each with
    the trainer ascending: one type of device trains and the other generates, or one does both and the other is not
    used.

    For each trainer the largest generator that can be placed: devices stay idle where no other can.

    Example:
        placed_splits({"H800": [8, 8]}, Limits())   # one family: 1+15, 2+14, 4+12, 8+8
    """
    families = []
    for trains in nodes:
        for generates in nodes:
            found = [
                placed
                for number in range(1, sum(nodes[trains]) + 1)
                if limits.allows_trainer(number)
                and (placed := _largest_generator(nodes, Pool(number, trains), generates, limits)) is not None
            ]
            if found:
                families.append(found)
    return families


def _largest_generator(nodes: Mapping[str, Sequence[int]], trainer: Pool, device: str, limits: Limits) -> Placed | None:
    free = sum(nodes[device]) - (trainer.num_devices if trainer.device == device else 0)
    size = limits.replica_devices
    for number in range(free // size * size, 0, -size):
        generator = Pool(number, device)
        shapes = arrange(nodes, trainer, generator)
        if shapes is not None:
            return Placed(Split(trainer, generator), *shapes)
    return None


def best_of(families: Iterable[Sequence[Item]], step_s: Callable[[Item], float]) -> tuple[Item, float] | None:
    """The item with the shortest step, and its seconds, which are infinite for what cannot run; None without a finite
    one.

    Each family is searched by a grid that narrows around the best: exact for up to `GRID_POINTS` items, else if the
    seconds have a single minimum along it.
    """
    found = min((_lowest(family, step_s) for family in families), key=lambda one: one[1], default=None)
    return None if found is None or found[1] == inf else found


def best_split(profile: Profile, pool: Pool, techniques: Collection[str], *, num_steps: int) -> Split:
    """The split of `pool` with the shortest step, searched as by `best_of`. Ties: the smaller trainer."""
    smallest, largest = profile.numbers.min_trainer_devices, pool.num_devices - 1
    rule = f"--devices must be > {smallest}: the training state of {profile.model} takes that many, and one generates"
    require(largest >= smallest, rule, pool.num_devices, "give more devices")

    def split(num_trainer: int) -> Split:
        return Split(replace(pool, num_devices=num_trainer), replace(pool, num_devices=pool.num_devices - num_trainer))

    def step_s(tried: Split) -> float:
        return run_split(profile, tried, techniques, num_steps=min(num_steps, SEARCH_STEPS)).step_s

    found = best_of([[split(number) for number in range(smallest, largest + 1)]], step_s)
    assert found is not None  # simulated seconds are finite
    return found[0]


def _lowest(family: Sequence[Item], step_s: Callable[[Item], float]) -> tuple[Item, float]:
    """The first of the fastest items that a grid that narrows around the best one finds, and its seconds."""

    @cache
    def value(index: int) -> float:
        return step_s(family[index])

    smallest, largest = 0, len(family) - 1
    while True:
        stride = max(1, -(-(largest - smallest) // (GRID_POINTS - 1)))
        best = min([*range(smallest, largest, stride), largest], key=value)
        if stride == 1:
            return family[best], value(best)
        smallest, largest = max(smallest, best - stride), min(largest, best + stride)
