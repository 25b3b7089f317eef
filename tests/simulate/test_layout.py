# SPDX-License-Identifier: Apache-2.0
"""Pools on nodes: shapes that fit, and the overrides for them."""

import random

import pytest

from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.splits import Shape, arrange, nodes_of, pool_overrides, type_overrides


def test_nodes_are_full_but_the_last():
    assert nodes_of(20) == [8, 8, 4] and nodes_of(16) == [8, 8] and nodes_of(3, 4) == [3]


@pytest.mark.parametrize(
    ("trainer", "generator", "shapes"),
    [
        (4, 28, (Shape(1, 4), Shape(7, 4))),  # 4 x 7 would leave no room for the 4
        (20, 12, (Shape(4, 5), Shape(4, 3))),  # on four nodes together
    ],
)
def test_a_pool_takes_as_few_nodes_as_there_is_room_for(trainer, generator, shapes):
    assert arrange({"H800": [8] * 4}, Pool(trainer, "H800"), Pool(generator, "H800")) == shapes


def test_types_have_nodes_of_their_own():
    nodes = {"H800": [8, 8, 4], "A100": [8] * 3}
    assert arrange(nodes, Pool(20, "H800"), Pool(24, "A100")) == (Shape(5, 4), Shape(3, 8))
    assert arrange(nodes, Pool(20, "H800"), Pool(1, "H800")) is None


def test_no_node_holds_more_than_it_has():
    rng = random.Random(0)
    placed = 0
    for _ in range(200):
        nodes = [rng.randint(1, 8) for _ in range(rng.randint(1, 5))]
        trainer = rng.randint(1, sum(nodes))
        generator = rng.randint(1, sum(nodes))
        found = arrange({"H800": nodes}, Pool(trainer, "H800"), Pool(generator, "H800"))
        if found is None:
            continue
        placed += 1
        assert [shape.num_devices for shape in found] == [trainer, generator]
        sizes = [shape.per_node for shape in found for _ in range(shape.nnodes)]
        assert can_be_packed(sorted(sizes, reverse=True), nodes)
    assert placed > 50


def can_be_packed(sizes, free) -> bool:
    """Exhaustive search, with equal free space tried once."""
    if not sizes:
        return True
    for left in set(free):
        if left >= sizes[0]:
            rest = list(free)
            rest[rest.index(left)] -= sizes[0]
            if can_be_packed(sizes[1:], rest):
                return True
    return False


def test_overrides_are_the_keys_of_both_pools():
    assert pool_overrides(Shape(5, 4), Shape(3, 8)) == [
        "trainer.nnodes=5",
        "trainer.n_gpus_per_node=4",
        "actor_rollout_ref.rollout.nnodes=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=8",
    ]
    assert type_overrides(Pool(5, "H800"), Pool(3, "H800")) == []
    assert type_overrides(Pool(5, "H800"), Pool(3, "A100")) == [
        "digen.placement.trainer_accelerator=H800",
        "digen.placement.generator_accelerator=A100",
    ]
