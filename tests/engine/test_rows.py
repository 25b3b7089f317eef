# SPDX-License-Identifier: Apache-2.0
"""Samples -> rows -> tiles."""

from __future__ import annotations

import random

import pytest
import torch
from verl.utils import tensordict_utils as tu

from verl_digen.engine.rows import make_rows, read_samples, tile_rows
from verl_digen.schedulers.deal import Row
from verl_digen.schedulers.tiles import Grid, plan_tiles
from verl_digen.types import TRAJECTORY_COLUMNS


def jagged(values):
    return torch.nested.as_nested_tensor(values, layout=torch.jagged)


def example(steps=((0, 1), (1,)), mask=None, guided=False):
    """Samples whose latents count up from 10 times their index, so a row tells where it comes from."""
    num_samples = len(steps)
    columns = {
        "latents": jagged([torch.arange(4.0)[:, None] + 10 * index for index in range(num_samples)]),
        "positions": jagged([torch.tensor(own) for own in steps]),
        "sigmas": jagged([torch.tensor([0.9 - 0.1 * step for step in own]) for own in steps]),
        "next_sigmas": jagged([torch.tensor([0.8 - 0.1 * step for step in own]) for own in steps]),
        "sigma_max": torch.full((num_samples, 1), 0.95),
        "log_probs": jagged([torch.tensor([float(-step) for step in own]) for own in steps]),
        "advantages": torch.arange(num_samples).float()[:, None],
        "uid": [f"g{index // 2}" for index in range(num_samples)],
    }
    if mask is not None:
        columns["loss_mask"] = torch.tensor(mask)
    conditions = {
        f"g{index}": ({"embeds": torch.zeros(2, 3)}, {"embeds": torch.ones(1, 3)} if guided else None)
        for index in range(num_samples)
    }
    return tu.get_tensordict(columns, {"conditions": conditions})


def test_rows_lie_sample_after_sample():
    rows = make_rows(read_samples(example()))
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
    rows = make_rows(read_samples(example(guided=True)))
    assert rows.negative_conditions is not None
    assert [len(condition["embeds"]) for condition in rows.negative_conditions] == [1, 1, 1]


def test_rewards_come_along_where_they_are_known():
    data = example(steps=((0, 1, 2), (1,)))
    assert make_rows(read_samples(data)).rewards is None
    data["rm_scores"] = torch.tensor([[0.5], [2.0]])
    rows = make_rows(read_samples(data).pick([(1, [0]), (0, [2, 0])]))
    assert rows.rewards is not None and rows.rewards.tolist() == [2.0, 0.5, 0.5]
    scored = read_samples(data).with_outcomes(torch.zeros(2), torch.tensor([3.0, 4.0]))
    assert scored.rewards is not None and scored.rewards.tolist() == [3.0, 4.0]


def test_padding_samples_are_left_out():
    samples = read_samples(example(steps=((0,), (1,), (2,)), mask=[0, 1, 1]))
    rows = make_rows(samples.take(samples.trained))
    assert rows.latents.flatten().tolist() == [11, 22] and rows.mask.tolist() == [1, 1]
    assert make_rows(samples).mask.tolist() == [0, 1, 1]


def test_a_rank_of_padding_alone_keeps_one_masked_sample():
    samples = read_samples(example(mask=[0.0, 0.0]))
    rows = make_rows(samples.take(samples.trained))
    assert rows.latents.flatten().tolist() == [0, 1] and rows.mask.tolist() == [0, 0]


@pytest.mark.parametrize("missing", [*TRAJECTORY_COLUMNS, "uid", "conditions"])
def test_missing_column_is_named(missing: str):
    with pytest.raises(RuntimeError, match=f"but lacks {missing}"):
        read_samples(example().exclude(missing))


def test_uid_without_conditions_is_named():
    data = example()
    tu.assign_non_tensor(data, conditions={"other": ({}, None)})
    with pytest.raises(RuntimeError, match="groups g0 have no conditions"):
        read_samples(data)


def test_partly_guided_batch_is_refused():
    data = example(steps=((0,), (1,), (2,)), guided=True)
    tu.get(data, "conditions")["g1"] = ({"embeds": torch.zeros(2, 3)}, None)
    with pytest.raises(RuntimeError, match="some have none"):
        make_rows(read_samples(data))


def test_pick_takes_steps_of_samples_and_their_latents():
    samples = read_samples(example(steps=((0, 1, 2), (1,))))
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
        old = jagged([torch.rand(len(own)) for own in steps])
        data = example(steps)
        data["old_log_probs"] = old
        samples = read_samples(data)
        numbers = rng.sample(range(100), len(steps))  # numbers in the plan are arbitrary
        own = [Row(number, step) for number, chosen in zip(numbers, steps, strict=True) for step in range(len(chosen))]
        dealt = [own, [Row(100, step) for step in range(rng.randint(0, 9))]]
        tiles = plan_tiles(dealt, 0, Grid(rng.randint(1, 3), rng.randint(1, 3)))
        assert_invariants(samples, {number: place for place, number in enumerate(numbers)}, tiles)
