# SPDX-License-Identifier: Apache-2.0
"""Pairs of pictures from a data set through verl's own main, on separate pools with GAP."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import ROOT, assert_succeeded, run_main, steps_of
from tests.weight_change import SGD

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]


def test_separate_pools_train_on_pairs_and_validate_by_generating(tmp_path):
    script = ROOT / "examples" / "tiny_qwen_image" / "pairs.py"
    subprocess.run([sys.executable, script, "--output", tmp_path / "pairs"], check=True)
    run = run_main(
        tmp_path / "separate",
        *SGD,
        "digen.loss.beta=1.0",  # gradients of the size that this rate is for
        f"data.train_files={tmp_path / 'pairs' / 'pairs.jsonl'}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=2",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.test_freq=3",
        "digen.gap.max_groups_per_fragment=2",  # all pairs of a batch may be encoded while the step before is saved
        recipe="[digen_flowgrpo,disaggregated,offline_dpo]",
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert [(row["reward/mean"], row["batch/num_samples"], row["actor/num_rows"]) for row in steps] == [(0.5, 8, 8)] * 3
    assert steps[0]["actor/pair_margin"] == pytest.approx(0, abs=1e-6)  # the policy is the reference
    assert steps[-1]["actor/pair_margin"] < 0
    assert 0 < steps[-1]["val/reward_shapes"] < 1 and "reward/shapes" not in steps[-1]
    assert all(row["actor/num_fragments"] > 1 for row in steps), "pairs train in fragments"
