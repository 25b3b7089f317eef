# SPDX-License-Identifier: Apache-2.0
"""Separate pools through verl's own main: the colocated trainer's weights, and a timeline that shows the overlap."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import SEPARATE, assert_same_gradients, assert_same_weights, run_main, steps_of
from tests.e2e.test_training import assert_succeeded
from tests.weight_change import SGD
from verl_digen.observe.timeline import read_timeline

pytestmark = pytest.mark.e2e


def test_three_steps_leave_the_weights_of_the_colocated_trainer(three_steps, separate):
    assert_succeeded(three_steps)
    assert_succeeded(separate)
    assert_same_weights(three_steps, separate, 3)
    assert_same_gradients(three_steps, separate)
    assert all(row["rollout/version_age_max_versions"] == 0 for row in steps_of(separate))


def test_training_begins_in_every_step_before_the_last_group_is_generated(separate):
    timeline = read_timeline(separate.run_dir / "timeline.jsonl")
    assert timeline.steps == [1, 2, 3]
    for step in timeline.steps:
        trained = [interval for interval in timeline.intervals if (interval.kind, interval.step) == ("train", step)]
        generated = [
            interval for interval in timeline.intervals if (interval.kind, interval.step) == ("generate", step)
        ]
        assert min(work.start_s for work in trained) < max(work.end_s for work in generated)
    for row in steps_of(separate):
        assert row["perf/overlap_s"] > 0
        for pool in ("trainer", "generator"):
            assert 0 <= row[f"perf/bubble_fraction/{pool}"] < 1


def test_checkpoints_and_the_validation_after_the_last_step_are_in_the_timeline(separate):
    intervals = read_timeline(separate.run_dir / "timeline.jsonl").intervals
    assert [interval.step for interval in intervals if interval.kind == "save"] == [1, 2, 3]
    assert [interval.step for interval in intervals if interval.kind == "validate"] == [3]
    assert all(row["perf/busy_s/trainer/save"] > 0 for row in steps_of(separate))


def test_the_timeline_command_draws_a_step(separate, tmp_path):
    digen = Path(sys.executable).with_name("digen")
    command = [digen, "timeline", separate.run_dir, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline_step_3.png").stat().st_size > 10_000
    assert "trainer" in done.stdout and "no_chunk_left" in done.stdout


@pytest.mark.long
def test_adapters_kl_two_ranks_and_a_group_size_that_no_rank_number_divides(tmp_path):
    """Replicas of the one run have the adapter merged into their weights, those of the other keep it separate."""
    overrides = (
        *SGD,
        "trainer.total_training_steps=3",
        "actor_rollout_ref.model.lora_rank=4",
        "digen.kl.coef=0.01",
        "digen.advantage.scale=group",
        "digen.sampling.true_cfg_scale=2.0",
        "actor_rollout_ref.rollout.n=3",
        "data.train_batch_size=2",
    )
    one = run_main(tmp_path / "colocated", *overrides, "actor_rollout_ref.model.lora.merge=true")
    assert_succeeded(one)
    other = run_main(
        tmp_path / "separate",
        *overrides,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        recipe=SEPARATE,
    )
    assert_succeeded(other)
    assert_same_gradients(one, other)
    # from step 2 on replicas serve what was committed: a gap means that it was not sent, or not used
    for run in (one, other):
        assert all(row["rollout/log_prob_gap_max"] <= 1e-4 for row in steps_of(run))
        assert steps_of(run)[-1]["rollout/probe_change"] > 0
