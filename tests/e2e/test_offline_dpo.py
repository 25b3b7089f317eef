# SPDX-License-Identifier: Apache-2.0
"""Pairs of pictures from a data set through verl's own main, in turn and on separate pools with GAP."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import (
    ROOT,
    Run,
    assert_same_gradients,
    assert_same_weights,
    assert_succeeded,
    run_main,
    steps_of,
)
from tests.weight_change import SGD
from verl_digen.observe.timeline import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long]


def intervals(run: Run, kind: str):
    return [each for each in read_timeline(run.run_dir / "timeline.jsonl").intervals if each.kind == kind]


def test_separate_pools_train_on_pairs_as_the_colocated_trainer_does_and_validate_by_generating(tmp_path):
    script = ROOT / "examples" / "tiny_qwen_image" / "pairs.py"
    subprocess.run([sys.executable, script, "--output", tmp_path / "pairs"], check=True, timeout=120)
    given = (
        *SGD,
        "digen.loss.beta=1.0",  # gradients of the size that this rate is for
        f"data.train_files={tmp_path / 'pairs' / 'pairs.jsonl'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
    )
    one = run_main(tmp_path / "colocated", *given, recipe="[digen_flowgrpo,offline_dpo]")
    assert_succeeded(one)
    other = run_main(tmp_path / "separate", *given, recipe="[digen_flowgrpo,disaggregated,offline_dpo]")
    assert_succeeded(other)
    assert_same_weights(one, other, 3)
    assert_same_gradients(one, other)
    for run in (one, other):
        steps = steps_of(run)
        assert [(row["reward/mean"], row["batch/num_samples"], row["actor/num_rows"]) for row in steps] == [
            (0.5, 8, 8)
        ] * 3
        assert steps[0]["actor/pair_margin"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
        assert steps[1]["actor/pair_margin"] != 0
        assert 0 < steps[-1]["val/reward_shapes"] < 1 and "reward/shapes" not in steps[-1]
    assert len(intervals(other, "train")) > 3, "a fragment trains as soon as its pairs are encoded"
