# SPDX-License-Identifier: Apache-2.0
"""Two steps through verl's own main, and the second resumed on separate pools: equal weights, and what is left behind.

All tests of these two runs are in this file: files run side by side, and each process would make the runs anew.
"""

import pytest

from tests.e2e.conftest import assert_same_gradients, assert_same_weights, assert_succeeded, steps_of
from verl_digen.cli import main
from verl_digen.observe.timeline.file import read_timeline
from verl_digen.report.page import collect

pytestmark = pytest.mark.e2e


def test_a_run_trains_validates_and_leaves_metrics_pictures_and_a_checkpoint(two_steps):
    assert_succeeded(two_steps)
    # verl says so on import: the driver's server imported it for all workers, and none by itself
    assert "engine is not available" not in two_steps.output
    steps = steps_of(two_steps)
    assert [row["step"] for row in steps] == [1, 2]
    lines = two_steps.output.splitlines()
    assert sum("validation after 2 steps: reward" in line or "step 2/2 | reward" in line for line in lines) == 2
    assert len(lines) < 30 and "digen export" in two_steps.output and "WARNING" not in two_steps.output
    log = (two_steps.run_dir / "console.log").read_text()
    assert len(log.splitlines()) > 500 and "could not be registered" not in log
    assert steps[-1]["val/reward"] > 0 and two_steps.metrics[0]["val/failed_samples"] == 0
    for row in steps:
        assert row["rollout/version_age_max_versions"] == 0, "strict mode trains what the current weights generated"
        assert row["actor/grad_norm"] > 0 and row["rollout/log_prob_gap_max"] <= 1e-5
        assert row["actor/ratio_deviation_max"] == row["actor/ratio_deviation_min"] == 0, "one update per batch"
        assert "reward/shapes" in row and "reward/gold" not in row, "a gold reward scores validations alone"
    assert all(row["rollout/version_lag_max_versions"] == 0 for row in steps[:1]), "replicas serve every update"
    assert steps[-1]["val/reward_gold"] < 0 and steps[-1]["hacking/warning"] == 0
    for name in ("step_000000.png", "step_000002.png", "before_after.png", "train_000002.png"):
        assert (two_steps.run_dir / "images" / name).stat().st_size > 1000
    assert 4 <= len(list((two_steps.run_dir / "images" / "train_000002").iterdir())) <= 8, "best and worst of 4 groups"
    assert list((two_steps.run_dir / "tensorboard" / "training").iterdir())
    report = collect(two_steps.run_dir)
    assert (two_steps.run_dir / "report.html").stat().st_size > 1_000_000 and report["curves"]["num_rows"] == 3
    assert not report["missing"]["left_out"] and report["missing"]["empty"].keys() <= {"warnings"}
    assert {bar["kind"] for bar in report["timelines"]["steps"][-1]["bars"]} >= {
        "generate",
        "score",
        "train",
        "publish",
    }
    assert (two_steps.run_dir / "latest_checkpointed_iteration.txt").read_text() == "2"


def test_a_run_that_is_resumed_on_separate_pools_leaves_the_weights_of_one_that_was_not_stopped(two_steps, separate):
    assert_succeeded(separate)
    assert_same_weights(two_steps, separate, 2)
    assert [row["step"] for row in steps_of(separate)] == [1, 2]
    assert_same_gradients(two_steps, separate)
    resumed = steps_of(separate)[-1]
    assert resumed["rollout/version_age_max_versions"] == 0
    for pool in ("trainer", "generator"):
        assert 0 <= resumed[f"perf/bubble_fraction/{pool}"] < 1


def test_a_checkpoint_and_the_validation_after_the_last_step_are_in_the_timeline(separate):
    # that training begins before the last group is generated depends on the cores: tests/trainer/test_conductor.py
    timeline = read_timeline(separate.run_dir / "timeline.jsonl")
    assert timeline.steps == [1, 2]
    last = {one.kind: one for one in timeline.intervals if one.step == 2 and one.lane.pool == "trainer"}
    assert last["publish"].end_s <= last["save"].start_s, "replicas need not wait for the files"
    assert any(one.kind == "validate" and one.step == 2 for one in timeline.intervals)
    assert steps_of(separate)[-1]["perf/busy_s/trainer/save"] > 0


def test_the_timeline_command_shows_a_step(separate, tmp_path, capsys):
    assert main(["timeline", str(separate.run_dir), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "timeline_step_2.trace.json").stat().st_size > 1_000
    shown = capsys.readouterr().out
    assert "trainer" in shown and "no_chunk_left" in shown
