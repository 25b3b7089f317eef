# SPDX-License-Identifier: Apache-2.0
"""Size of a fragment by the number of ranks: the rule, and simulated runs with it."""

import random
from dataclasses import replace

import pytest

from tests.schedulers.flat import changed, make_rules
from verl_digen.hardware.devices import Pool
from verl_digen.schedulers.rules import GROUPS_PER_FRAGMENT
from verl_digen.tools.simulate.cluster import Split, run_split, simulated_rules
from verl_digen.tools.simulate.profile import load_profile


@pytest.mark.parametrize(
    ("num_ranks", "group_size", "num_prompts", "num_steps", "groups"),
    [
        (1, 12, 8, 9, 8),  # one call may train the batch
        (24, 12, 32, 9, 8),
        (288, 12, 352, 9, 8),  # three rows per rank
        (289, 12, 352, 9, 24),  # 288 samples
        (704, 12, 352, 9, 58),  # 696 samples; one group more would give four ranks rows of two samples
        (704, 8, 128, 19, 32),  # a quarter of the batch
        (704, 8, 16, 19, 8),
        (96, 8, 64, 2, 12),  # a window of two steps: eight groups are 128 rows
        (96, 8, 64, 19, 8),
    ],
)
def test_a_fragment_has_eight_groups_or_a_sample_for_every_rank(num_ranks, group_size, num_prompts, num_steps, groups):
    rows = group_size * num_steps
    rules = make_rules(num_prompts, group_size, rows_per_group=rows, num_trainer_ranks=num_ranks)
    assert rules.largest_fragment == groups
    assert changed(rules, max_groups_per_fragment=5).largest_fragment == 5, "a number is taken as it is"


@pytest.mark.parametrize("seed", range(100))
def test_a_large_fragment_has_at_most_a_sample_per_rank_and_a_quarter_of_the_batch(seed):
    rng = random.Random(seed)
    num_ranks, group_size, num_prompts = rng.randint(1, 2_000), rng.randint(1, 64), rng.randint(1, 2_000)
    rows = group_size * rng.randint(1, 50)
    rules = make_rules(num_prompts, group_size, rows_per_group=rows, num_trainer_ranks=num_ranks)
    groups = rules.largest_fragment
    assert groups >= GROUPS_PER_FRAGMENT
    if groups > GROUPS_PER_FRAGMENT:
        assert groups * group_size <= num_ranks and 4 * groups <= num_prompts
        assert GROUPS_PER_FRAGMENT * rows < 3 * num_ranks, "eight are too few"
    assert replace(rules, num_trainer_ranks=2 * num_ranks).largest_fragment >= groups


@pytest.mark.parametrize(
    ("max_versions", "fraction", "allowed"),
    [
        (0, 1.0, [10, 0]),
        (1, 0.4, [10, 4, 0]),  # 10 x 0.4 is 3.999... in floating point
        (1, 1.0, [10, 10, 0]),
        (3, 0.7, [10, 10, 10, 7, 0]),
    ],
)
def test_a_share_of_a_batch_may_be_as_stale_as_allowed_and_all_of_it_one_version_less(max_versions, fraction, allowed):
    rules = make_rules(10, 4, max_versions=max_versions, fraction=fraction)
    assert [rules.stale_allowance(age) for age in range(len(allowed))] == allowed


@pytest.mark.parametrize(
    ("group_size", "num_ranks", "changes", "sizes"),
    [
        (12, 24, {}, (24, 48, 96)),  # all of the batch
        (16, 4, {}, (4, 8, 16, 32)),
        (16, 4, {"assist_spans_groups": False}, (4, 8, 16)),
        (16, 4, {"assist_chunk_size": 500}, (128,)),
        (12, 1, {}, (2, 4, 8)),  # a slot's chunk, up to `max_chunk_size`
    ],
)
def test_an_assist_has_a_sample_for_each_rank_or_twice_as_many_up_to_the_bounds(group_size, num_ranks, changes, sizes):
    rules = changed(make_rules(8, group_size, num_trainer_ranks=num_ranks, max_chunk_size=8), **changes)
    assert rules.assist_sizes(num_slots=8) == sizes


def step_s(devices: tuple[int, int], num_prompts: int, most: int | None) -> float:
    """Simulated seconds of a strict step with assists."""
    profile = load_profile("flux1-12b")
    profile = replace(profile, numbers=replace(profile.numbers, num_prompts=num_prompts))
    split = Split(*(Pool(number, "H800") for number in devices))
    rules = changed(simulated_rules(profile, split, ("gap", "tsp", "tag")), max_groups_per_fragment=most)
    return run_split(profile, split, ("gap", "tsp", "tag"), num_steps=4, rules=rules).step_s


@pytest.mark.parametrize(
    ("devices", "num_prompts", "share"), [((704, 320), 352, 0.70), ((224, 32), 112, 1.01), ((224, 32), 224, 1.01)]
)
def test_a_step_is_shorter_than_with_fragments_of_eight_groups_or_as_long(devices, num_prompts, share):
    auto_s, eight_s = (step_s(devices, num_prompts, most) for most in (None, GROUPS_PER_FRAGMENT))
    assert auto_s <= share * eight_s
