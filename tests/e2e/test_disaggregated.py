# SPDX-License-Identifier: Apache-2.0
"""Separate pools through verl's own main: the colocated trainer's weights, and a timeline that shows the overlap."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import SEPARATE, assert_same_weights, run_main, steps_of
from tests.e2e.test_training import assert_succeeded
from verl_digen.observe.timeline import read_timeline

pytestmark = pytest.mark.e2e
NUM_PROMPTS = 4


def test_three_steps_leave_the_weights_of_the_colocated_trainer(three_steps, separate):
    assert_succeeded(three_steps)
    assert_succeeded(separate)
    assert_same_weights(three_steps, separate, 3)
    for ours, theirs in zip(steps_of(separate), steps_of(three_steps), strict=True):
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-4)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
        assert ours["rollout/version_age_max_versions"] == 0


def test_trainer_and_generator_overlap_in_every_step_and_the_first_group_is_early(separate):
    timeline = read_timeline(separate.run_dir / "timeline.jsonl")
    assert timeline.steps == [1, 2, 3]
    for row in steps_of(separate):
        assert row["perf/overlap_s"] > 0
        assert row["perf/first_group_fraction"] <= 1.5 / NUM_PROMPTS
        for pool in ("trainer", "generator"):
            assert 0 <= row[f"perf/bubble_fraction/{pool}"] < 1


def test_the_timeline_command_draws_a_step(separate, tmp_path):
    digen = Path(sys.executable).with_name("digen")
    command = [digen, "timeline", separate.run_dir, "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "timeline_step_3.png").stat().st_size > 10_000
    assert "trainer" in done.stdout and "no_chunk_left" in done.stdout


def test_adapters_kl_two_ranks_and_a_group_size_that_no_rank_number_divides(tmp_path):
    overrides = (
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "actor_rollout_ref.model.lora_rank=4",
        "digen.kl.coef=0.01",
        "digen.advantage.scale=group",
        "digen.sampling.guidance_scale=2.0",
        "actor_rollout_ref.rollout.n=3",
        "data.train_batch_size=2",
    )
    one = run_main(tmp_path / "colocated", *overrides)
    assert_succeeded(one)
    other = run_main(
        tmp_path / "separate",
        *overrides,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        recipe=SEPARATE,
    )
    assert_succeeded(other)
    for ours, theirs in zip(steps_of(other), steps_of(one), strict=True):
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=1e-3)
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-4)
