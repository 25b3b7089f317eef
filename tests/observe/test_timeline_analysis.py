# SPDX-License-Identifier: Apache-2.0
"""Time accounting of a step, against a slow reference in exact arithmetic."""

import random
from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

import pytest

from tests.observe.timeline_runs import GROUP_SAMPLES, START_S, interval, lane, random_intervals, simulated_run
from verl_digen.observe.timeline.analysis import (
    LABELS,
    around_step,
    lane_seconds,
    overlap_s,
    pool_usage,
    step_metrics,
    step_window,
)

WINDOW = (START_S, START_S + 10)


def reference_usage(intervals, step, num_devices):
    """Pool -> label -> device-seconds: every elementary time span of every device, compared with every interval."""
    (frame,) = (one for one in intervals if one.kind == "step" and one.step == step)
    start_s, end_s = Fraction(frame.start_s), Fraction(frame.end_s)
    spent = {pool: defaultdict(Fraction) for pool, count in num_devices.items() if count}
    lanes = {one.lane for one in intervals if one.kind != "step" and one.lane.num_devices}
    for pool, labels in spent.items():
        silent = num_devices[pool]
        for own in (own for own in lanes if own.pool == pool):
            inside = [one for one in intervals if one.lane == own and one.end_s > start_s and one.start_s < end_s]
            if not inside:
                continue
            silent -= own.num_devices
            edges = {min(max(Fraction(at), start_s), end_s) for one in inside for at in (one.start_s, one.end_s)}
            edges = sorted(edges | {start_s, end_s})
            for left, right in pairwise(edges):
                middle = (left + right) / 2
                labels_here = [one.reason or one.kind for one in inside if one.start_s < middle < one.end_s]
                label = min(labels_here, key=LABELS.index, default="unattributed")
                labels[label] += own.num_devices * (right - left)
        labels["unattributed"] += silent * (end_s - start_s)
    return spent


def assert_invariants(intervals, step, num_devices):
    usages = pool_usage(intervals, step, num_devices)
    start_s, end_s = step_window(intervals, step)
    for pool, usage in usages.items():
        total_s = sum(usage.busy_s.values()) + sum(usage.bubble_s.values())
        assert total_s == pytest.approx(num_devices[pool] * (end_s - start_s), abs=1e-9, rel=0)
        assert usage.busy_fraction + usage.bubble_fraction == pytest.approx(1, abs=1e-12)
        assert min([*usage.busy_s.values(), *usage.bubble_s.values()]) >= 0
    return usages


def test_busy_and_bubble_seconds_add_up_and_equal_the_slow_reference():
    rng = random.Random(0)
    for _ in range(300):
        intervals, num_devices = random_intervals(rng, rng.randint(1, 6), rng.randint(1, 60))
        usages = assert_invariants(intervals, 1, num_devices)
        expected = reference_usage(intervals, 1, num_devices)
        assert set(usages) == set(expected)
        for pool, usage in usages.items():
            found = {**usage.busy_s, **usage.bubble_s}
            for label in LABELS:
                assert found.get(label, 0.0) == pytest.approx(float(expected[pool][label]), abs=1e-9, rel=0)


def test_neither_order_nor_cutting_changes_a_metric():
    rng = random.Random(1)
    runs = [simulated_run(early=early) for early in (True, False)]
    for intervals, num_devices in runs:
        expected = step_metrics(intervals, 2, num_devices)
        for _ in range(20):
            parts = []
            for one in intervals:
                at_s = rng.uniform(one.start_s, one.end_s)
                if one.kind == "step" or rng.random() < 0.5 or at_s in (one.start_s, one.end_s):
                    parts.append(one)
                else:
                    parts += [replace(one, end_s=at_s, is_cut=True), replace(one, start_s=at_s)]
            rng.shuffle(parts)
            assert step_metrics(parts, 2, num_devices) == pytest.approx(expected, abs=1e-9)


def test_one_lane_has_the_seconds_of_what_it_did():
    found = lane_seconds(
        [
            interval("generate", 0, 4),
            interval("publish", 3, 6),
            interval("wait", 5, 9, reason="no_chunk_left"),
            interval("wait", 8.5, 9, reason="slot_lost"),
        ],
        WINDOW,
    )
    assert found == {"generate": 4, "publish": 2, "no_chunk_left": 3, "unattributed": 1}


def test_a_lane_that_moves_to_another_host_is_one_lane():
    intervals = [
        interval("step", 0, 10, on=lane("driver", num_devices=0)),
        interval("generate", 0, 4, on=lane("generator", 0)),
        interval("wait", 4, 6, on=lane("generator", 0), reason="slot_lost"),
        interval("generate", 6, 10, on=lane("generator", 0, host="node-9")),
    ]
    assert step_metrics(intervals, 1, {"generator": 1})["perf/bubble_s/generator/slot_lost"] == 2


def test_overlap_is_the_time_in_which_both_pools_work():
    trainer, other = lane("trainer"), lane("generator", 1)
    intervals = [
        interval("generate", 0, 4),
        interval("generate", 3, 6, on=other),
        interval("train", 2, 3, on=trainer),
        interval("assist", 5, 8, on=trainer),
        interval("publish", 0, 2, on=trainer),  # moving weights is no training
        interval("train", -3, -1, on=trainer),
    ]
    assert overlap_s(intervals, WINDOW) == 1 + 1
    assert overlap_s([], WINDOW) == 0


def test_images_per_s_counts_a_fragment_once_however_many_ranks_share_it():
    frame = interval("step", 0, 10, on=lane("driver", num_devices=0))
    ranks = [
        interval("train", 0, 2, on=lane("trainer", rank), fragment_id=fragment, num_samples=20)
        for rank in range(2)
        for fragment in ("f0", "f1")
    ]
    metrics = step_metrics(
        [frame, *ranks, interval("train", 5, 6, on=lane("trainer"), step=2, num_samples=99)], 1, {"trainer": 2}
    )
    assert metrics["perf/images_per_s"] == 4 and metrics["perf/images_per_s_per_device"] == 2
    intervals, num_devices = simulated_run(num_groups=8)
    start_s, end_s = step_window(intervals, 2)
    rate = step_metrics(intervals, 2, num_devices)["perf/images_per_s"]
    assert rate * (end_s - start_s) == pytest.approx(8 * GROUP_SAMPLES)


def test_the_first_group_fraction_follows_chunks_across_lanes_and_counts_a_redone_chunk_last():
    frame = interval("step", 0, 20, on=lane("driver", num_devices=0))
    chunks = [
        interval("generate", 0, 2, chunk_id="a0", group_ids=("a",), detail={"failed": "SlotLost"}),
        interval("generate", 1, 4, chunk_id="a1", group_ids=("a",), on=lane("generator", 1)),
        interval("generate", 3, 6, chunk_id="a0", group_ids=("a",)),
        interval("assist", 4, 9, chunk_id="b0", group_ids=("b",), on=lane("trainer")),
        interval("generate", 6, 11, chunk_id="c0", group_ids=("c",)),
    ]
    metrics = step_metrics([frame, *chunks], 1, {"generator": 2, "trainer": 1})
    assert metrics["perf/first_group_fraction"] == pytest.approx((6 - 1) / (11 - 1))
    assert "perf/first_group_fraction" not in step_metrics([frame], 1, {"generator": 2})


def test_a_steps_surroundings_say_the_same_of_it_as_the_whole_run():
    intervals, num_devices = simulated_run(num_steps=6)
    around = around_step(intervals, 3)
    assert {one.step for one in around} == {2, 3, 4}, "the one before, and the one begun early"
    assert step_metrics(around, 3, num_devices) == step_metrics(intervals, 3, num_devices)


def test_what_cannot_be_accounted_for_is_an_error():
    frame = interval("step", 0, 10, on=lane("driver", num_devices=0))
    with pytest.raises(ValueError, match="step 2 must have a `step` interval"):
        step_metrics([frame], 2, {"trainer": 1})
    with pytest.raises(ValueError, match="must last longer than 0 s"):
        step_metrics([interval("step", 3, 3)], 1, {"trainer": 1})
    with pytest.raises(ValueError, match=r"pool generator must stand for at most .* got 2 of .*in step 1"):
        step_metrics(
            [frame, *(interval("generate", 0, 1, on=lane("generator", i)) for i in (0, 1))], 1, {"generator": 1}
        )
    with pytest.raises(ValueError, match="pool generator must stand for at most"):
        step_metrics([frame, interval("generate", 0, 1)], 1, {"trainer": 1})
