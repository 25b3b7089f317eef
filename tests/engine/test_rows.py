# SPDX-License-Identifier: Apache-2.0
"""Samples -> rows -> tiles."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from verl_digen.engine.rows import Samples, make_rows, tile_rows
from verl_digen.schedulers.deal import Row
from verl_digen.schedulers.tiles import Grid, plan_tiles


def example(steps=((0, 1), (1,)), guided=False) -> Samples:
    """Samples whose latents count up from 10 times their index, so a row tells where it comes from."""
    conditions = [
        ({"embeds": torch.zeros(2, 3)}, {"embeds": torch.ones(1, 3)} if guided else None) for _ in range(len(steps))
    ]
    return Samples(
        columns={
            "latents": [torch.arange(4.0)[:, None] + 10 * index for index in range(len(steps))],
            "positions": [torch.tensor(own) for own in steps],
            "sigmas": [torch.tensor([0.9 - 0.1 * step for step in own]) for own in steps],
            "next_sigmas": [torch.tensor([0.8 - 0.1 * step for step in own]) for own in steps],
            "sigma_max": [torch.tensor([0.95]) for _ in steps],
            "log_probs": [torch.tensor([float(-step) for step in own]) for own in steps],
        },
        conditions=[conditions[index // 2] for index in range(len(steps))],  # groups of two
        advantages=torch.arange(len(steps)).float(),
        old_log_probs=None,
    )


def test_rows_lie_sample_after_sample():
    rows = make_rows(example())
    assert rows.latents.flatten().tolist() == [0, 1, 11]
    assert rows.next_latents.flatten().tolist() == [1, 2, 12]
    torch.testing.assert_close(rows.sigmas, torch.tensor([0.9, 0.8, 0.8]))
    assert rows.sigma_max.shape == (3,)
    assert rows.advantages.tolist() == [0, 0, 1]
    assert rows.log_probs.tolist() == [0, -1, -1]
    assert rows.mask.tolist() == [1, 1, 1]
    assert rows.negative_conditions is None
    assert rows.conditions[0] is rows.conditions[2]  # both samples are of group g0


def test_negative_conditions_come_along():
    rows = make_rows(example(guided=True))
    assert rows.negative_conditions is not None
    assert [len(condition["embeds"]) for condition in rows.negative_conditions] == [1, 1, 1]


def test_outcomes_come_along_where_they_are_known():
    samples = example(steps=((0, 1, 2), (1,)))
    assert make_rows(samples).rewards is None
    samples = samples.with_outcomes(torch.tensor([-1.0, 1.0]), torch.tensor([0.5, 2.0]))
    rows = make_rows(samples.pick([(1, [0]), (0, [2, 0])]))
    assert rows.rewards is not None and rows.rewards.tolist() == [2.0, 0.5, 0.5]
    assert rows.advantages.tolist() == [1, -1, -1]


def test_partly_guided_batch_is_refused():
    samples = example(steps=((0,), (1,), (2,)), guided=True)
    conditions = [*samples.conditions[:2], ({"embeds": torch.zeros(2, 3)}, None)]
    with pytest.raises(RuntimeError, match="some have none"):
        make_rows(replace(samples, conditions=conditions))


def test_pick_takes_steps_of_samples_and_their_latents():
    samples = example(steps=((0, 1, 2), (1,)))
    rows = make_rows(samples.pick([(1, [0]), (0, [2, 0])]))
    assert rows.latents.flatten().tolist() == [11, 2, 0]
    assert rows.next_latents.flatten().tolist() == [12, 3, 1]
    assert rows.advantages.tolist() == [1, 0, 0]
    assert rows.log_probs.tolist() == [-1, -2, 0]


def assert_invariants(samples, places, tiles):
    """Every row of the samples is in one tile, with its own old log-prob; fillers have mask 0."""
    found = []
    for tile in tiles:
        rows, old = tile_rows(samples, tile, places)
        assert len(rows) == len(tile.rows) == len(old)
        assert rows.mask.tolist() == [0.0 if tile.is_filler else 1.0] * len(rows)
        if not tile.is_filler:
            found += zip(rows.latents.flatten().tolist(), old.tolist(), strict=True)
    rows = make_rows(samples)
    old = torch.cat(list(samples.old_log_probs))
    assert sorted(found) == sorted(zip(rows.latents.flatten().tolist(), old.tolist(), strict=True))


def test_every_row_is_in_one_tile_for_many_shapes():
    rng = random.Random(0)
    for _ in range(50):
        steps = tuple(tuple(sorted(rng.sample(range(3), rng.randint(1, 3)))) for _ in range(rng.randint(1, 5)))
        samples = replace(example(steps), old_log_probs=[torch.rand(len(own)) for own in steps])
        numbers = rng.sample(range(100), len(steps))  # numbers in the plan are arbitrary
        own = [Row(number, step) for number, chosen in zip(numbers, steps, strict=True) for step in range(len(chosen))]
        dealt = [own, [Row(100, step) for step in range(rng.randint(0, 9))]]
        tiles = plan_tiles(dealt, 0, Grid(rng.randint(1, 3), rng.randint(1, 3)))
        assert_invariants(samples, {number: place for place, number in enumerate(numbers)}, tiles)
