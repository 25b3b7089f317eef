# SPDX-License-Identifier: Apache-2.0
import json
import os
from dataclasses import replace

import numpy as np
import pytest

from tests.tags import SAMPLING, make_tag
from verl_digen.algorithms.outside import Outside
from verl_digen.config.reward import OF_ALL
from verl_digen.observe.metrics import (
    call_metrics,
    episode_metrics,
    perf_metrics,
    reward_metrics,
    spared_metrics,
    staleness_metrics,
    training_metrics,
    tree_metrics,
    union_s,
)
from verl_digen.observe.run_files import keep_until
from verl_digen.report.summary import duration
from verl_digen.trainer.run_output import append_metrics, progress_line
from verl_digen.types import RewardCall
from verl_digen.types.settings import EpisodeFacts, Turn


def tag(reward, start=0.0, version=4, uid="p0", **parts):
    spans = {"generated": (start, start + 2), "scored": (start + 2, start + 2.5)}
    return make_tag(reward, uid=uid, version=version, parts=parts, **spans)


def test_union_counts_overlapping_time_once():
    assert union_s([]) == 0
    assert union_s([(5, 6), (0, 2), (1, 3), (1.5, 2)]) == 4


def test_reward_metrics_report_parts_alone_and_count_groups_without_spread():
    metrics = reward_metrics([tag(1.0, a=2.0), tag(0.0, a=4.0), tag(0.5, uid="p1"), tag(0.5, uid="p1")])
    assert metrics["reward/mean"] == 0.5 and metrics["reward/a"] == 3.0
    assert metrics.keys() - {"reward/a"} == {f"reward/{name}" for name in OF_ALL}, "names that no reward may have"
    assert metrics["reward/zero_spread_fraction"] == 0.5
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
    assert spared_metrics(tags) == {"rollout/shared_step_share": pytest.approx(8 / 30)}
    assert spared_metrics([make_tag()]) == {}


def test_skipped_steps_are_a_share_of_all_steps_and_told_where_steps_may_be_skipped():
    cheap = replace(SAMPLING, outside=Outside(cache=0.1))
    tags = [make_tag(sampling=cheap, num_skipped_steps=number) for number in (0, 3, 6)]
    assert spared_metrics(tags) == {"rollout/skipped_step_share": pytest.approx(9 / 30)}
    assert spared_metrics([make_tag()]) == {}


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


def test_episodes_are_counted_by_turn_and_idle_is_the_time_in_which_no_replica_generates():
    def turns(*generated):
        return tuple(Turn(10, SAMPLING, "a cat", span, environment_s=span[0], reward=0.0) for span in generated)

    episodes = EpisodeFacts(turns((1, 3), (7, 9)), is_exceeded=True, num_retries=2), EpisodeFacts(turns((2, 4)))
    assert episode_metrics([make_tag()]) == {}
    assert episode_metrics([make_tag(), *(make_tag(episode=one) for one in episodes)]) == {
        **{"episodes/turns_mean": 1.5, "episodes/turns_max": 2.0, "episodes/exceeded": 1.0},
        "episodes/retries": 2.0,
        **{"episodes/environment_s": pytest.approx(10 / 3), "episodes/environment_p95_s": 7.0},
        "episodes/idle_share": pytest.approx(3 / 8),
    }


def test_overhead_is_what_no_generation_scoring_or_training_covers():
    metrics = perf_metrics([tag(0, 0.0), tag(0, 1.0)], step_s=6.0, train_s=2.0, sync_s=0.1, num_devices=2)
    assert metrics["perf/generate_s"] == 3.0
    assert metrics["perf/overhead_s"] == pytest.approx(6.0 - 3.5 - 2.0)
    assert metrics["perf/images_per_s_per_device"] == pytest.approx(2 / 6 / 2)
    beside = {"training": [(3.0, 5.0)], "since_s": 1.0}  # of which 1 s is while nothing is generated or scored
    metrics = perf_metrics([tag(0, 0.0), tag(0, 1.0)], step_s=6.0, train_s=2.0, sync_s=0.1, num_devices=2, **beside)
    assert metrics["perf/overhead_s"] == pytest.approx(6.0 - 4.0)


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


def test_a_resumed_run_keeps_its_metrics_where_the_disk_is_full(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        append_metrics(path, step, {"reward/mean": step / 10})
    written = path.read_text()

    def fail(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        keep_until(path, 1)
    assert path.read_text() == written


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59.6, "1m00s"), (125, "2m05s"), (11220, "3h07m")])
def test_durations_read_naturally(seconds, text):
    assert duration(seconds) == text


def test_the_progress_line_shows_step_reward_throughput_and_time_left():
    metrics = reward_metrics([tag(0.5)]) | perf_metrics([tag(0.5)], step_s=3, train_s=1, sync_s=0, num_devices=1)
    line = progress_line(metrics, step=3, num_steps=10, remaining_s=70)
    assert line.startswith("step 3/10 | reward 0.500") and line.endswith("eta 1m10s") and "0.3 images/s" in line


def test_signs_of_log_ratios_are_means_over_rows_of_one_sign_of_the_advantage():
    sums = {"ratio_sign_positive": 0.2, "advantage_positive_fraction": 0.4}
    none = {"ratio_sign_negative": 0.0, "advantage_negative_fraction": 0.0}
    found = training_metrics(sums | none)
    assert found["actor/ratio_sign_positive"] == pytest.approx(0.5) and found["actor/ratio_sign_negative"] == 0.0
