# SPDX-License-Identifier: Apache-2.0
"""Pools as a person types them, their places on the nodes of a cluster, and the overrides that ask for them. Pure.

- verl gives a pool as nodes x devices per node (`nnodes`, `n_gpus_per_node`), and Ray puts each of these nodes on one
  node of the cluster; several may share one.
- Shapes of fewer nodes come first; they are placed by first fit, the largest first. So a placement that is found can be
  made; of two odd shapes one that could be made may be missed.

Invariant (tests/simulate/test_layout.py): what is placed on a node is never more than it has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from verl_digen.hardware.devices import PEAK_TFLOPS, Pool
from verl_digen.require import require

NODE_SIZE = 8
"""Devices of a node where nothing says how many it has."""

ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True)
class Shape:
    """A pool as verl's config gives it."""

    nnodes: int
    per_node: int

    @property
    def num_devices(self) -> int:
        return self.nnodes * self.per_node


def nodes_of(num_devices: int, node_size: int = NODE_SIZE) -> list[int]:
    """Devices of each node: full ones, and one for the rest.

    Example:
        nodes_of(20)   # [8, 8, 4]
    """
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
    """Shapes of both pools that fit on the nodes together; None if there are none.

    Args:
        nodes: type of device -> devices of each node of that type.

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


def pool_overrides(trainer: Shape, generator: Shape) -> list[str]:
    """Overrides that give verl's main these shapes."""
    return [
        f"trainer.nnodes={trainer.nnodes}",
        f"trainer.n_gpus_per_node={trainer.per_node}",
        f"{ROLLOUT}.nnodes={generator.nnodes}",
        f"{ROLLOUT}.n_gpus_per_node={generator.per_node}",
    ]


def type_overrides(trainer: Pool, generator: Pool) -> list[str]:
    """Overrides that say which type of device each pool takes; none where both have the same."""
    if trainer.device == generator.device:
        return []
    return [
        f"digen.placement.trainer_accelerator={trainer.device}",
        f"digen.placement.generator_accelerator={generator.device}",
    ]


def parse_pool(option: str, text: str, *, default_device: str) -> Pool:
    """Parse `16` or `16xH20`.

    Raises:
        ValueError: the text is not a pool; the message names `option`.
    """
    match = re.fullmatch(r"(\d+)(?:x(\w+))?", text)
    require(match is not None, f"{option} must be a number of devices, or e.g. 16xH20", text, "write a number")
    assert match is not None
    num_devices, device = int(match[1]), match[2] or default_device
    require(num_devices >= 1, f"{option} must be >= 1 device", num_devices, "a pool needs a device")
    return Pool(num_devices, known_device(option, device))


def known_device(option: str, device: str) -> str:
    """Return `device` if it is in `PEAK_TFLOPS`.

    Raises:
        ValueError: it is not; the message names `option`.
    """
    require(
        device in PEAK_TFLOPS, f"{option} must name a device type of {', '.join(PEAK_TFLOPS)}", device, "choose one"
    )
    return device
