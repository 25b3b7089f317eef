# SPDX-License-Identifier: Apache-2.0
import json
import math
from dataclasses import replace

import numpy as np
import pytest

from tests.tags import SAMPLING, make_tag
from verl_digen.algorithms.outside import Outside
from verl_digen.observe.metrics import (
    call_metrics,
    perf_metrics,
    reward_metrics,
    sharing_metrics,
    skipping_metrics,
    staleness_metrics,
    training_metrics,
    tree_metrics,
    union_s,
)
from verl_digen.observe.numerics import FirstSteps, Remark
from verl_digen.observe.run_files import keep_until
from verl_digen.trainer.run_output import append_metrics, duration, progress_line
from verl_digen.types import RewardCall


def tag(reward, start=0.0, version=4, uid="p0", **parts):
    spans = {"generated": (start, start + 2), "scored": (start + 2, start + 2.5)}
    return make_tag(reward, uid=uid, version=version, parts=parts, **spans)


def test_union_counts_overlapping_time_once():
    assert union_s([]) == 0
    assert union_s([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4


def test_reward_metrics_report_parts_alone_and_count_groups_without_spread():
    metrics = reward_metrics([tag(1.0, a=2.0), tag(0.0, a=4.0), tag(0.5, uid="p1"), tag(0.5, uid="p1")])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/a"] == 3.0
    assert metrics["reward/zero_spread_groups"] == 1
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 0.5, 0.5]))


def test_calls_of_rewards_are_counted_once_however_many_samples_share_them():
    batch = RewardCall("ocr", 1.0, 3.0, 3, 1, counts=(("retries", 2),))
    last = RewardCall("ocr", 3.0, 4.0, 1, 0, counts=(("retries", 5),))
    own = [RewardCall("shapes", 0.0, 0.5, 1, 0), RewardCall("shapes", 0.0, 0.7, 1, 0)]
    tags = [make_tag(calls=calls) for calls in ((batch, own[0]), (batch, own[1]), (batch,), (last,))]
    assert call_metrics(tags) == {
        **{"reward_calls/ocr_count": 2.0, "reward_calls/ocr_s": 1.5, "reward_calls/ocr_samples": 2.0},
        "reward_calls/ocr_queued_max_samples": 1.0,
        "reward_calls/ocr_retries": 7.0,
        **{"reward_calls/shapes_count": 2.0, "reward_calls/shapes_s": 0.6, "reward_calls/shapes_samples": 1.0},
        "reward_calls/shapes_queued_max_samples": 0.0,
    }


def test_shared_steps_are_a_share_of_all_steps_and_told_with_shared_noise_only():
    shared = replace(SAMPLING, shared_initial_noise=True)
    tags = [make_tag(sampling=shared, num_shared_steps=number) for number in (0, 4, 4)]
    assert sharing_metrics(tags) == {"rollout/shared_step_share": pytest.approx(8 / 30)}
    assert sharing_metrics([make_tag()]) == {}


def test_skipped_steps_are_a_share_of_all_steps_and_told_where_steps_may_be_skipped():
    cheap = replace(SAMPLING, outside=Outside(cache=0.1))
    tags = [make_tag(sampling=cheap, num_skipped_steps=number) for number in (0, 3, 6)]
    assert skipping_metrics(tags) == {"rollout/skipped_step_share": pytest.approx(9 / 30)}
    assert skipping_metrics([make_tag()]) == {}


def test_values_of_a_trees_nodes_spread_by_depth_and_edges_are_counted_once():
    nodes = [(0, 0), (0, 1), (2, 2), (2, 3)]
    tags = [make_tag(reward, nodes=own) for reward, own in zip((1.0, 3.0, 5.0, 11.0), nodes, strict=True)]
    equal = [make_tag(0.0, uid="p1", nodes=own) for own in nodes]
    assert tree_metrics([*tags, *equal]) == {
        "branches/num_edges": 12.0,
        "branches/value_std_of_2_nodes": 3.0 / 2,
        "branches/value_std_of_4_nodes": pytest.approx(14**0.5 / 2),
    }
    assert tree_metrics([make_tag(1.0)]) == {}


def test_overhead_is_what_no_generation_scoring_or_training_covers():
    metrics = perf_metrics([tag(0, 0.0), tag(0, 1.0)], step_s=6.0, train_s=2.0, sync_s=0.1, num_devices=2)
    assert metrics["perf/generate_s"] == 3.0
    assert metrics["perf/overhead_s"] == pytest.approx(6.0 - 3.5 - 2.0)
    assert metrics["perf/images_per_s_per_device"] == pytest.approx(2 / 6 / 2)


def test_strict_mode_has_age_zero():
    assert staleness_metrics([tag(0, version=4)], trained_version=4)["rollout/version_age_max_versions"] == 0
    assert staleness_metrics([tag(0, version=2)], trained_version=4)["rollout/version_age_max_versions"] == 2


def test_a_resumed_run_continues_the_metrics_file_without_repeating_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    keep_until(path, 0)
    for step in (1, 2, 3):
        append_metrics(path, step, {"reward/mean": step / 10, "note": "text stays out", "array": np.float32(1)})
    with open(path, "a") as file:
        file.write('{"step": 4, "rew')  # the disk was full
    keep_until(path, 2)
    append_metrics(path, 3, {"reward/mean": 0.9})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[2]["reward/mean"] == 0.9 and "note" not in rows[0]


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (125, "2m05s"), (11220, "3h07m")])
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text


def test_the_progress_line_shows_step_reward_throughput_and_time_left():
    metrics = reward_metrics([tag(0.5)]) | perf_metrics([tag(0.5)], step_s=3, train_s=1, sync_s=0, num_devices=1)
    line = progress_line(metrics, step=3, num_steps=10, remaining_s=70)
    assert line.startswith("step 3/10 | reward 0.500") and line.endswith("eta 1m10s") and "0.3 images/s" in line


# -- remarks of a run's first steps: the noise floor against the clip range, gradients against Adam's eps ----
CLIP = {"clip_range": 1e-4, "clip_range_high": 3e-4}


def step(gap: float | None = 1e-6, age: float = 0.0, **more: float) -> dict[str, float]:
    found = {"rollout/version_age_max_versions": age, **more}
    return found if gap is None else found | {"rollout/log_prob_gap_mean": gap, "rollout/log_prob_gap_max": 4 * gap}


def remarks_of(watch: FirstSteps, *steps: dict[str, float]) -> list[Remark]:
    return [remark for metrics in steps for remark in watch.observe(metrics)]


def test_the_noise_floor_is_told_once_after_the_first_steps():
    watch = FirstSteps(CLIP, is_recorded=True)
    assert not remarks_of(watch, step(1e-6), step(2e-6))
    (remark,) = watch.observe(step(3e-6))
    assert remark.text.startswith("noise floor: log-probs of replicas and trainer differ by 2.0e-06 on average and 1.2")
    assert "that is 2 % of digen.loss.clip_range=0.0001" in remark.text and not remark.is_warning
    assert not remarks_of(watch, step(1.0), step(1.0))


@pytest.mark.parametrize(("gap", "warns"), [(3.3e-5, False), (3.4e-5, True), (math.nan, True)])
def test_a_floor_above_a_third_of_the_clip_range_is_warned_of(gap: float, warns: bool):
    (remark,) = FirstSteps(CLIP, is_recorded=True, num_steps=1).observe(step(gap))
    assert remark.is_warning == warns and ("are clipped for rounding alone: set it to" in remark.text) == warns


def test_a_floor_that_the_ratio_does_not_see_is_no_warning():
    (remark,) = FirstSteps(CLIP, is_recorded=False, num_steps=1).observe(step(1.0))
    assert not remark.is_warning and "does not reach the ratio" in remark.text
    (remark,) = FirstSteps({}, is_recorded=True, num_steps=1).observe(step(1.0))
    assert not remark.is_warning and "no clip range" in remark.text


def test_stale_samples_do_not_count_to_the_floor():
    watch = FirstSteps(CLIP, is_recorded=True)
    assert not watch.observe(step(1e-6))
    (remark,) = watch.observe(step(1e-3, age=1.0))
    assert "differ by 1.0e-06 on average" in remark.text
    assert not remarks_of(FirstSteps(CLIP, is_recorded=True), *[step(1e-3, age=1.0)] * 4)
    assert not remarks_of(FirstSteps(CLIP, is_recorded=True), *[step(None)] * 4)  # forward points


@pytest.mark.parametrize(("ratio", "warns"), [(10.0, False), (0.5, True)])
def test_gradients_that_are_small_against_eps_are_warned_of(ratio: float, warns: bool):
    sizes = {"actor/grad_rms_to_eps": ratio, "actor/grad_rms": ratio * 1e-8, "actor/eps_bound_share": 0.75}
    found = remarks_of(FirstSteps({}, is_recorded=False), *[step(None, **sizes)] * 6)
    assert [remark.is_warning for remark in found] == [True] * warns
    if warns:
        assert "RMS of 5.0e-09, 0.5 times eps, and eps holds back 75 % of the trained parameters" in found[0].text


def test_signs_of_log_ratios_are_means_over_rows_of_one_sign_of_the_advantage():
    sums = {"ratio_sign_positive": 0.2, "advantage_positive_fraction": 0.4}
    none = {"ratio_sign_negative": 0.0, "advantage_negative_fraction": 0.0}
    found = training_metrics(sums | none)
    assert found["actor/ratio_sign_positive"] == pytest.approx(0.5) and found["actor/ratio_sign_negative"] == 0.0
