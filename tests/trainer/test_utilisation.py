# SPDX-License-Identifier: Apache-2.0
import math

import pytest

from tests.tags import make_tag
from verl_digen.config import RolloutConfig
from verl_digen.errors import RunStopped
from verl_digen.trainer.step_result import GAP, StepResult, check_log_prob_gap, utilisation
from verl_digen.trainer.timelines import call_intervals, joined_name
from verl_digen.trainer.validation import validation_metrics
from verl_digen.types import RewardCall

METRICS = {
    "actor/num_rows": 40.0,
    "actor/row_forward_flops": 1e13,
    "actor/row_training_flops": 3e13,
    "perf/train_s": 2.0,
    "perf/generate_s": 4.0,
}


def utilised(
    trainer: tuple[int, str | None], generator: tuple[int, str | None], tags: dict | None = None, num_assisted: int = 0
):
    """Utilisation of a step of 10 denoise steps; without `tags` of 8 samples."""
    tags = {f"g_{index}_0": make_tag() for index in range(8)} if tags is None else tags
    result = StepResult(tags, {}, 2.0, 0, num_assisted=num_assisted)
    return utilisation(result, METRICS, num_steps=10, devices={"trainer": trainer, "generator": generator})


def test_each_pool_is_measured_by_its_own_work_time_and_devices():
    found = utilised((2, "NVIDIA H100 80GB HBM3"), (4, "NVIDIA H20"))
    assert found == pytest.approx(
        {
            "perf/tflops_per_device/trainer": 40 * 3e13 / 2.0 / 2 / 1e12,
            "perf/mfu/trainer": 40 * 3e13 / 2.0 / 2 / 989e12,
            "perf/tflops_per_device/generator": 80 * 1e13 / 4.0 / 4 / 1e12,
            "perf/mfu/generator": 80 * 1e13 / 4.0 / 4 / 148e12,
        }
    )


@pytest.mark.parametrize("name", [None, "Some Accelerator 9000"])
def test_a_device_without_a_known_peak_has_no_share_of_it(name):
    found = utilised((1, name), (1, name))
    assert sorted(found) == ["perf/tflops_per_device/generator", "perf/tflops_per_device/trainer"]


def test_shared_skipped_and_assisted_steps_are_no_forwards_of_the_generators():
    tags = {f"g_{index}_0": make_tag(num_shared_steps=2 * index, num_skipped_steps=index) for index in range(3)}
    found = utilised((1, None), (1, None), tags, num_assisted=1)
    num_forwards = (3 - 1) * 10 - (2 + 4) - (1 + 2)
    assert found["perf/tflops_per_device/generator"] == pytest.approx(num_forwards * 1e13 / 4.0 / 1e12)


@pytest.mark.parametrize("gap", [0.11, math.nan, math.inf])
def test_a_gap_above_the_bound_stops_the_run_and_says_where_to_look(gap):
    with pytest.raises(RunStopped, match=r"step 3: rollout/log_prob_gap_max must be <= .*=0.1 nats.*rollout\.dtype"):
        check_log_prob_gap({GAP: gap}, 0.1, step=3)


def test_a_gap_within_the_bound_any_gap_without_one_and_no_gap_pass():
    check_log_prob_gap({GAP: 0.1}, 0.1, step=3)
    check_log_prob_gap({GAP: 9.0}, None, step=3)
    check_log_prob_gap({}, 0.1, step=3)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_bound_must_be_positive(value):
    with pytest.raises(ValueError, match="max_log_prob_gap must be null or > 0"):
        RolloutConfig(max_log_prob_gap=value)


# -- names of nodes in the timeline --------------------------------------------------------------------------
def test_a_lane_on_several_nodes_says_how_many():
    assert joined_name(["b", "b"]) == "b" and joined_name(["b", "a", "c", "a"]) == "a and 2 more"


def test_a_call_of_a_reward_is_one_interval_on_its_own_lane_with_the_groups_it_scored():
    batch, judged, function = (RewardCall(name, 1.0, 3.0, 2, 5) for name in ("ocr", "judge", "shapes"))
    tags = [make_tag(uid="a", calls=(function, batch)), make_tag(uid="b", calls=(batch, judged))]
    found = call_intervals(tags, ["judge", "ocr"], "node-0", step=7)
    assert [(one.lane.name, one.group_ids, one.detail["reward"]) for one in found] == [
        ("reward/2", ("a", "b"), "ocr"),
        ("reward/1", ("b",), "judge"),
    ]
    first = found[0]
    assert (first.kind, first.step, first.start_s, first.end_s, first.num_samples) == ("score", 7, 1.0, 3.0, 2)
    assert first.lane.num_devices == 0 and first.detail["num_queued"] == 5


# -- metrics of a validation ---------------------------------------------------------------------------------
def test_a_validation_counts_what_failed_and_has_the_mean_reward_of_all_and_of_each_source():
    facts = [(0.5, "drawbench"), (1.5, "drawbench"), (4.0, "ocr"), (0.0, "ocr"), (1.0, "ocr")]
    tags = {
        f"val-{index:05d}_0_7": make_tag(reward, uid=f"val-{index:05d}", version=7, data_source=source)
        for index, (reward, source) in enumerate(facts)
    }
    found = validation_metrics(tags, num_samples=6)
    assert not [name for name in found if "zero_spread" in name], "a prompt has one sample"
    assert found["val/reward"] == 1.4 and found["val/failed_samples"] == 1
    assert (found["val/drawbench/reward"], found["val/ocr/reward"]) == (1.0, 5 / 3)
    one_source = validation_metrics(dict(list(tags.items())[:2]), num_samples=2)
    assert one_source["val/reward"] == 1.0 and "val/drawbench/reward" not in one_source
