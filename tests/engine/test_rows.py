# SPDX-License-Identifier: Apache-2.0
"""Samples -> rows -> tiles, for both kinds of points. Joint columns: the same wherever a fragment's rows lie."""

import random
from dataclasses import replace

import pytest
import torch

from tests.engine.harness import SAMPLING, all_picks, described
from tests.tags import changed
from verl_digen.algorithms.objectives import ClampedConfig, Joint, JointRows, LossConfig, LossOutput, register_objective
from verl_digen.config import AdvantageConfig
from verl_digen.engine.fragment import fragment_rows
from verl_digen.engine.ledger import AdvantageLedger
from verl_digen.engine.rows import ForwardPoints, PathPoints, Samples, TileWork, make_rows
from verl_digen.schedulers.tiles import Grid, Row, deal_rows, plan_tiles
from verl_digen.types import Geometry, Noised, TrainingRows, Transitions
from verl_digen.types.settings import Turn

PATH = PathPoints()


def example(steps=((0, 1), (1,)), guided=False) -> Samples:
    """Samples whose latents count up from 10 times their index, so a row tells where it comes from."""
    prompts = [f"c{index // 2}" for index in range(len(steps))]  # groups of two
    return Samples(
        described=[
            described(str(index), "g", 10.0 + index, len(own), index, condition_key=prompts[index])
            for index, own in enumerate(steps)
        ],
        columns={
            "latents": [torch.arange(4.0)[:, None] + 10 * index for index in range(len(steps))],
            "positions": [torch.tensor(own) for own in steps],
            "sigmas": [torch.tensor([0.9 - 0.1 * step for step in own]) for own in steps],
            "next_sigmas": [torch.tensor([0.8 - 0.1 * step for step in own]) for own in steps],
            "sigma_max": [torch.tensor([0.95]) for _ in steps],
            "log_probs": [torch.tensor([float(-step) for step in own]) for own in steps],
        },
        conditions={
            key: ({"embeds": torch.zeros(2, 3)}, {"embeds": torch.ones(1, 3)} if guided else None) for key in prompts
        },
        advantages=torch.arange(len(steps)).float(),
    )


def transitions(rows: TrainingRows) -> Transitions:
    assert isinstance(rows.point, Transitions)
    return rows.point


def test_rows_lie_sample_after_sample():
    samples = example()
    rows = make_rows(PATH, samples, all_picks(samples))
    assert rows.latents.flatten().tolist() == [0, 1, 11]
    point = transitions(rows)
    assert point.next_latents.flatten().tolist() == [1, 2, 12]
    torch.testing.assert_close(rows.sigmas, torch.tensor([0.9, 0.8, 0.8]))
    assert point.sigma_max.shape == (3,) and point.old_log_probs is None
    assert rows.advantages.tolist() == [0, 0, 1]
    assert rows.rewards is not None and rows.rewards.tolist() == [10, 10, 11]
    assert point.log_probs.tolist() == [0, -1, -1]
    assert rows.mask.tolist() == [1, 1, 1]
    assert rows.negative_conditions is None
    assert rows.conditions[0] is rows.conditions[2]  # both samples are of group g0


def test_conditions_are_those_of_each_rows_prompt():
    samples = example(steps=((0,), (0,), (0, 1)))
    rows = make_rows(PATH, samples, [(2, [1]), (0, [0]), (1, [0])])
    (first, _), (second, _) = samples.conditions.values()
    assert all(found is wanted for found, wanted in zip(rows.conditions, (second, first, first), strict=True))


def test_rows_that_may_not_share_a_forward_are_refused():
    samples = example(steps=((0,), (1,), (2,)), guided=True)
    conditions = {**samples.conditions, "c1": ({"embeds": torch.zeros(2, 3)}, None)}
    with pytest.raises(RuntimeError, match="2 negative conditions of 3 rows"):
        make_rows(PATH, replace(samples, conditions=conditions), all_picks(samples))
    large = changed(samples.described[0], sampling=replace(SAMPLING, geometry=Geometry(64, 32)))
    with pytest.raises(RuntimeError, match="rows of one tile must have one sampling"):
        make_rows(PATH, replace(samples, described=[large, *samples.described[1:]]), all_picks(samples))


def test_rows_are_those_picked_in_order():
    samples = example(steps=((0, 1, 2), (1,)))
    old = [replace(samples.described[0], old_log_probs=(0.1, 0.2, 0.3)), samples.described[1]]
    samples = replace(samples, described=[old[0], replace(old[1], old_log_probs=(0.4,))])
    rows = make_rows(PATH, samples, [(1, [0]), (0, [2, 0])])
    assert rows.latents.flatten().tolist() == [11, 2, 0]
    point = transitions(rows)
    assert point.next_latents.flatten().tolist() == [12, 3, 1]
    assert rows.advantages.tolist() == [1, 0, 0]
    assert point.log_probs.tolist() == [-1, -2, 0]
    assert point.old_log_probs is not None
    torch.testing.assert_close(point.old_log_probs, torch.tensor([0.4, 0.3, 0.1]))


def test_a_row_of_an_episode_has_the_largest_sigma_of_its_own_turn():
    turns = tuple(Turn(num_steps, SAMPLING, "", (0.0, 1.0), 0.0, 0.0) for num_steps in (2, 1))
    samples = example(steps=((0, 1, 2), (0,)))
    samples = replace(
        samples,
        described=[replace(samples.described[0], turns=turns), samples.described[1]],
        columns=samples.columns | {"sigma_max": [torch.tensor([0.95, 0.9]), torch.tensor([0.85])]},
    )
    _, _, point = PATH.make(samples.described, samples.columns, [(0, [2, 0]), (1, [0]), (0, [1])])
    torch.testing.assert_close(point.sigma_max, torch.tensor([0.9, 0.95, 0.85, 0.95]))


def test_experts_and_samplings_have_buckets_of_their_own():
    large = replace(SAMPLING, geometry=Geometry(64, 32))
    samples = [
        described("a", "g", 0.0, 2, experts=(0, 1)),
        described("b", "h", 0.0, 2, experts=(0, 1), sampling=large),
        described("c", "g", 0.0, 1, experts=(1,)),
    ]
    assert [row.bucket for row in fragment_rows(samples)] == [0, 2, 1, 3, 2]


def clean_samples() -> Samples:
    return Samples(
        described=[described(str(index), "g", 0.0, 2, index) for index in range(2)],
        columns={
            "clean": [torch.full((3, 2), 1.0 + index, dtype=torch.bfloat16) for index in range(2)],
            "sigmas": [torch.tensor([1.0, 0.25]) for _ in range(2)],
        },
        conditions={"g": ({"embeds": torch.zeros(2, 3)}, None)},
        advantages=torch.zeros(2),
    )


def test_a_forward_row_is_the_clean_latents_noised_at_its_level():
    samples = clean_samples()
    rows = make_rows(ForwardPoints(run_seed=7), samples, all_picks(samples))
    assert isinstance(rows.point, Noised)
    assert rows.latents.dtype == torch.float32 and rows.sigmas.tolist() == [1.0, 0.25, 1.0, 0.25]
    assert rows.point.clean[:, 0, 0].tolist() == [1, 1, 2, 2]
    torch.testing.assert_close(rows.latents[0], rows.point.noise[0])  # sigma 1 is noise alone
    torch.testing.assert_close(rows.latents[1], 0.75 * rows.point.clean[1] + 0.25 * rows.point.noise[1])
    assert len({tuple(noise.flatten().tolist()) for noise in rows.point.noise}) == 4


def test_noise_of_a_forward_row_is_that_of_its_sample_and_point():
    samples = clean_samples()
    whole = make_rows(ForwardPoints(run_seed=7), samples, all_picks(samples))
    alone = make_rows(ForwardPoints(run_seed=7), samples, [(1, [1])])
    second = replace(
        samples,
        described=samples.described[1:],
        columns={name: column[1:] for name, column in samples.columns.items()},
        advantages=samples.advantages[1:],
    )
    on_another_rank = make_rows(ForwardPoints(run_seed=7), second, [(0, [1])])
    other = make_rows(ForwardPoints(run_seed=8), samples, [(1, [1])])
    assert torch.equal(alone.latents[0], whole.latents[3])
    assert torch.equal(on_another_rank.latents[0], whole.latents[3])
    assert not torch.equal(alone.latents[0], other.latents[0])


def test_a_forward_row_of_an_episode_has_the_clean_latents_of_its_own_turn():
    turns = tuple(Turn(num_steps, SAMPLING, "", (0.0, 1.0), 0.0, 0.0) for num_steps in (2, 1))
    samples = [described("0", "g", 0.0, 3, turns=turns)]
    clean = torch.stack([torch.full((3, 2), 1.0), torch.full((3, 2), 2.0)])
    columns = {"clean": [clean.flatten(0, 1)], "sigmas": [torch.tensor([0.5, 0.25, 0.75])]}
    _, sigmas, made = ForwardPoints(run_seed=7).make(samples, columns, [(0, [2, 0, 1])])
    assert torch.equal(made.clean, clean[[1, 0, 0]]) and sigmas.tolist() == [0.75, 0.5, 0.25]


def assert_invariants(samples, places, tiles):
    """Every row of the samples is in one tile, with its own old log-prob; fillers have mask 0."""
    found = []
    work = TileWork(PATH, samples, places, tiles, {}, (), (), samples.advantages)
    for tile in tiles:
        rows = work.rows_of(tile)
        old = transitions(rows).old_log_probs
        assert old is not None
        assert len(rows) == len(tile.rows) == len(old)
        assert rows.mask.tolist() == [0.0 if tile.is_filler else 1.0] * len(rows)
        if not tile.is_filler:
            found += zip(rows.latents.flatten().tolist(), old.tolist(), strict=True)
    rows = make_rows(PATH, samples, all_picks(samples))
    old = torch.tensor([value for sample in samples.described for value in sample.old_log_probs])
    assert sorted(found) == sorted(zip(rows.latents.flatten().tolist(), old.tolist(), strict=True))


def test_every_row_is_in_one_tile_for_many_shapes():
    rng = random.Random(0)
    for _ in range(50):
        steps = tuple(tuple(sorted(rng.sample(range(3), rng.randint(1, 3)))) for _ in range(rng.randint(1, 5)))
        samples = example(steps)
        old = [tuple(torch.rand(len(own)).tolist()) for own in steps]
        pairs = zip(samples.described, old, strict=True)
        samples = replace(samples, described=[replace(sample, old_log_probs=own) for sample, own in pairs])
        numbers = rng.sample(range(100), len(steps))  # numbers in the plan are arbitrary
        own = [Row(number, step) for number, chosen in zip(numbers, steps, strict=True) for step in range(len(chosen))]
        dealt = [own, [Row(100, step) for step in range(rng.randint(0, 9))]]
        tiles = plan_tiles(dealt, 0, Grid(rng.randint(1, 3), rng.randint(1, 3)))
        assert_invariants(samples, {number: place for place, number in enumerate(numbers)}, tiles)


NUM_POINTS = (3, 1, 2, 2)
SAMPLES = [described(str(n), "ab"[n // 2], 0.0, count) for n, count in enumerate(NUM_POINTS)]
ROWS = fragment_rows(SAMPLES)


def value_of(row: Row) -> float:
    return 10.0 * row.sample + row.point + 1


def by_group(rows: JointRows) -> torch.Tensor:
    """Sum of a group's scalars, and in its decimals what else a row knows."""
    sums = torch.zeros(2).index_add(0, rows.groups, rows.scalars)
    return sums[rows.groups] + rows.samples / 10 + rows.points / 100 + rows.advantages / 1000


def on_ranks(num_ranks: int, shape: Grid, advantages: torch.Tensor) -> list[tuple[Row, float]]:
    """(row, its column) of every tile of every rank, with the sum over the ranks made here."""
    dealt = deal_rows(ROWS, num_ranks)
    nothing = Samples([], {}, {}, torch.zeros(0))
    groups = [sample.facts.uid for sample in SAMPLES]
    works = [
        TileWork(PATH, nothing, {}, plan_tiles(dealt, rank, shape), {}, ROWS, groups, advantages)
        for rank in range(num_ranks)
    ]
    scalars = [[torch.tensor([value_of(row) for row in tile.rows]) for tile in work.tiles] for work in works]
    parts: list[torch.Tensor] = []

    def collect(part: torch.Tensor) -> torch.Tensor:
        parts.append(part.clone())
        return part

    for work, own in zip(works, scalars, strict=True):
        work.joint_columns(own, by_group, collect)
    total = torch.stack(parts).sum(0)
    found: list[tuple[Row, float]] = []
    for work, own in zip(works, scalars, strict=True):
        columns = work.joint_columns(own, by_group, lambda part: total)
        for tile, column in zip(work.tiles, columns, strict=True):
            found += zip(tile.rows, column.tolist(), strict=True)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])  # more than rows: one has a padding tile alone
def test_a_column_is_the_same_on_any_ranks_and_tiles(num_ranks: int):
    advantages = torch.tensor([1.0, 2.0, 3.0, 4.0])
    sums = {group: sum(value_of(row) for row in ROWS if row.sample // 2 == group) for group in (0, 1)}
    rng = random.Random(num_ranks)
    for _ in range(20):
        for row, value in on_ranks(num_ranks, Grid(rng.randint(1, 3), rng.randint(1, 3)), advantages):
            decimals = row.sample / 10 + row.point / 100 + float(advantages[row.sample]) / 1000
            assert value == pytest.approx(sums[row.sample // 2] + decimals, rel=1e-6)


def test_a_group_whose_sample_is_held_is_held_where_its_rows_are_needed_together():
    for whole_groups, released in ((False, ("a0", "b0", "b1")), (True, ("b0", "b1"))):
        ledger = AdvantageLedger(
            AdvantageConfig(), num_samples=9, clip=1.0, is_homogeneous=True, whole_groups=whole_groups
        )
        ledger.add([described(f"a{number}", "a", reward, 1) for number, reward in enumerate((1.0, 0.0, 2.0))])
        ledger.add([described(key, "b", 1.0, 1) for key in ("b0", "b1")])
        assert tuple(sample.key for sample in ledger.take().samples) == released
        rest = {"a0", "a1", "a2"} - {*released}
        assert {sample.key for sample in ledger.take(is_last=True).samples} == rest


def mean_of_group(rows: JointRows, config: LossConfig) -> torch.Tensor:
    """Mean of the scalars over the rows of each row's group."""
    counts = torch.bincount(rows.groups).float()
    return (torch.zeros(len(counts)).index_add(0, rows.groups, rows.scalars) / counts)[rows.groups]


def test_a_joint_column_that_training_does_not_have_inputs_for_is_refused():
    joint = Joint("mine", ("std",), scalar=lambda rows: rows["std"], combine=mean_of_group)
    with pytest.raises(ValueError, match="columns of the joint column of the objective 'x' must be one of"):
        register_objective("x", config=ClampedConfig, points="forward", columns=("mine",), joint=joint)(
            lambda rows, config: LossOutput(rows.mean(rows["mine"]), {})
        )
