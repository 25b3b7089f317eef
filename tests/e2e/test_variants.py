# SPDX-License-Identifier: Apache-2.0
"""Runs with other settings: adapters on several ranks, a reward that fails."""

import subprocess

import pytest

from tests.e2e.conftest import SEPARATE, assert_same_gradients, assert_succeeded, run_main, steps_of
from tests.weight_change import SGD

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

BROKEN_REWARD = """
def compute_score(data_source, solution_image, ground_truth, extra_info=None):
    raise ConnectionError("the scorer is down")
"""


def test_a_reward_that_always_fails_ends_the_run_with_its_reason_and_no_ray(tmp_path):
    (tmp_path / "reward.py").write_text(BROKEN_REWARD)
    run = run_main(
        tmp_path / "run",
        "digen.reward.functions={}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=2",
    )
    assert run.exit_code != 0
    last = run.last_line
    assert "the scorer is down" in last and "digen.max_refills_per_step" in last, run.output[-3000:]
    alive = subprocess.run(["pgrep", "-fc", str(tmp_path)], capture_output=True, text=True, check=False)
    assert int(alive.stdout) == 0


def test_adapters_kl_and_a_batch_that_its_ranks_do_not_divide(tmp_path):
    """5 samples on 2 ranks that take turns with replicas, on 2 that generate, and on 3 with a replica of its own.
    Replicas of the first run have the adapter merged into their weights, those of the last keep it separate."""
    overrides = (
        *SGD,
        "trainer.total_training_steps=2",
        "actor_rollout_ref.model.lora_rank=4",
        "digen.kl.coef=0.01",
        "digen.advantage.scale=group",
        "digen.sampling.true_cfg_scale=2.0",
        "actor_rollout_ref.rollout.n=5",
        "data.train_batch_size=1",
    )
    merged = "actor_rollout_ref.model.lora.merge=true"
    one = run_main(tmp_path / "colocated", *overrides, merged, "trainer.n_gpus_per_node=2")
    assert_succeeded(one)
    own = run_main(tmp_path / "own", *overrides, "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.name=trainer")
    assert_succeeded(own)
    other = run_main(
        tmp_path / "separate",
        *overrides,
        "trainer.n_gpus_per_node=3",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        recipe=SEPARATE,
    )
    assert_succeeded(other)
    assert_same_gradients(one, other)
    assert_same_gradients(one, own)
    # from step 2 on replicas serve what was committed: a gap means that it was not sent, or not used
    for run in (one, own, other):
        assert all(row["rollout/log_prob_gap_max"] <= 1e-4 for row in steps_of(run))
