# SPDX-License-Identifier: Apache-2.0
"""Virtual devices take the time that the simulator says."""

from dataclasses import replace

import pytest

from tests.tags import SAMPLING
from verl_digen.config import DigenConfig, SamplingConfig, TspConfig, VirtualConfig
from verl_digen.engine.fragment import FragmentSample
from verl_digen.simulate.costs import sample_s, train_s
from verl_digen.simulate.profile import load_profile
from verl_digen.virtual.durations import ReplicaClock, virtual_durations

DIGEN = DigenConfig(
    sampling=SamplingConfig(num_steps=20),
    virtual=VirtualConfig(profile="wan2.1-14b", time_scale=0.1, trainer_ranks=16),
)
NUMBERS = load_profile("wan2.1-14b").numbers


def fragment(num_groups: int, group_size: int, num_steps: int) -> list[FragmentSample]:
    return [
        FragmentSample(f"p{group}_{index}_0", f"p{group}", index, 0.0, num_steps, SAMPLING, condition_key="")
        for group in range(num_groups)
        for index in range(group_size)
    ]


@pytest.mark.parametrize("has_tsp", [True, False])
@pytest.mark.parametrize("num_groups", [1, 3, 16])
def test_a_fragment_takes_the_simulators_time(has_tsp, num_groups):
    durations = virtual_durations(replace(DIGEN, tsp=TspConfig(enable=has_tsp)))
    expected = train_s(NUMBERS, num_groups, 16, slowdown=1.0, has_tsp=has_tsp)
    assert durations.train_s(fragment(num_groups, 8, 19)) == pytest.approx(0.1 * expected)


def test_the_runs_own_batch_counts_not_the_profiles():
    durations = virtual_durations(DIGEN)
    numbers = replace(NUMBERS, group_size=4, num_trained_steps=2)
    expected = train_s(numbers, 2, 16, slowdown=1.0, has_tsp=True)
    assert durations.train_s(fragment(2, 4, 2)) == pytest.approx(0.1 * expected)
    halved = virtual_durations(replace(DIGEN, sampling=SamplingConfig(num_steps=10)))
    assert halved.sample_s == pytest.approx(0.1 * sample_s(replace(NUMBERS, num_steps=10), 1.0))
    assert (durations.score_s, durations.commit_s) == (0.1 * NUMBERS.score_s, 0.1 * NUMBERS.commit_s)


def test_devices_of_another_type_compute_at_their_own_speed():
    virtual = replace(DIGEN.virtual, trainer_device="H800", generator_device="H20")
    durations = virtual_durations(replace(DIGEN, virtual=virtual))
    slowdown = 989.0 / 148.0
    assert durations.sample_s == pytest.approx(0.1 * sample_s(NUMBERS, slowdown))
    assert durations.train_s(fragment(2, 8, 19)) == virtual_durations(DIGEN).train_s(fragment(2, 8, 19))
    with pytest.raises(ValueError, match=r"digen\.virtual\.generator_device must name a device type.*got 'TPU'"):
        virtual_durations(replace(DIGEN, virtual=replace(virtual, generator_device="TPU")))


def test_no_profile_and_an_unknown_one_are_told_with_the_key():
    with pytest.raises(ValueError, match=r"digen\.virtual\.profile must name a profile"):
        virtual_durations(DigenConfig())
    with pytest.raises(ValueError, match=r"digen\.virtual\.profile must be a file or one of flux1-12b, .*got 'wan'"):
        virtual_durations(DigenConfig(virtual=VirtualConfig(profile="wan")))


def test_samples_of_a_chunk_are_ready_together_and_another_groups_queue_behind():
    clock = ReplicaClock(sample_s=2.0)
    first = clock.join("p0", now_s=10.0)
    assert clock.join("p0", now_s=10.1) is first
    assert first.ends_s == 14.0
    second = clock.join("p1", now_s=11.0)
    assert (first.ends_s, second.ends_s) == (14.0, 16.0)
    assert clock.join("p0", now_s=12.0).ends_s == 18.0, "p0 does not overtake p1"
    assert clock.join("p0", now_s=30.0).ends_s == 32.0, "idle since"


def test_a_replica_is_never_done_sooner_than_its_samples_take():
    clock = ReplicaClock(sample_s=1.0)
    batches = [clock.join(f"p{number // 3}", now_s=0.1 * number) for number in range(12)]
    ends = sorted({id(batch): batch.ends_s for batch in batches}.values())
    assert ends == pytest.approx([3.0, 6.0, 9.0, 12.0])
