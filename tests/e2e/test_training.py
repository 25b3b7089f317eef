# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess

import pytest

from tests.e2e.conftest import AVERAGED, Run, assert_same_weights, run_main, steps_of
from tests.weight_change import SGD

pytestmark = pytest.mark.e2e

BROKEN_REWARD = """
def compute_score(data_source, solution_image, ground_truth, extra_info=None):
    raise ConnectionError("the scorer is down")
"""


def assert_succeeded(run: Run) -> None:
    assert run.exit_code == 0, run.output[-8000:]


def test_a_run_trains_validates_and_leaves_metrics_pictures_and_a_checkpoint(three_steps):
    assert_succeeded(three_steps)
    steps = steps_of(three_steps)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert steps[-1]["val/reward"] > 0 and three_steps.metrics[0]["val/failed_samples"] == 0
    for row in steps:
        assert row["rollout/version_age_max_versions"] == 0, "strict mode trains what the current weights generated"
        assert row["actor/grad_norm"] > 0
    for name in ("step_000000.png", "step_000003.png", "before_after.png"):
        assert (three_steps.run_dir / "images" / name).stat().st_size > 1000
    assert list((three_steps.run_dir / "tensorboard").iterdir())
    assert (three_steps.run_dir / "latest_checkpointed_iteration.txt").read_text() == "3"


def test_on_the_first_pass_the_ratio_is_one_and_replay_gives_the_recorded_log_probs(three_steps):
    for row in three_steps.metrics[1:]:
        assert row["actor/ratio_deviation_max"] == 0 and row["actor/ratio_deviation_min"] == 0
        assert row["rollout/log_prob_gap_max"] <= 1e-5


def test_replicas_prove_that_they_compute_with_every_update(three_steps):
    for row in steps_of(three_steps)[:2]:
        assert row["rollout/probe_change"] > 0 and row["rollout/version_lag_max_versions"] == 0


def test_a_resumed_run_continues_as_if_it_had_not_stopped(three_steps, tmp_path):
    assert_succeeded(three_steps)
    stopped = tmp_path / "stopped"
    shutil.copytree(three_steps.run_dir, stopped)
    for step in (2, 3):
        shutil.rmtree(stopped / f"global_step_{step}")
    (stopped / "latest_checkpointed_iteration.txt").write_text("1")
    resumed = run_main(
        stopped, *SGD, *AVERAGED, "trainer.total_training_steps=3", "trainer.save_freq=1", "trainer.resume_mode=auto"
    )
    assert_succeeded(resumed)
    assert [row["step"] for row in steps_of(resumed)] == [1, 2, 3]
    assert_same_weights(three_steps, resumed, 3)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4", "digen.kl.coef=0.01"),
            id="two ranks, LoRA adapter",
        ),
        pytest.param(
            (
                *("digen.kl.coef=0.01", "digen.sampling.true_cfg_scale=2.0"),
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            ),
            id="full weights, guided, two updates per batch",
            marks=pytest.mark.long,
        ),
    ],
)
def test_variants_train_and_generation_agrees_with_training(tmp_path, overrides):
    # at this rate a step is seen in the log-probs of the next one
    rate = "actor_rollout_ref.actor.optim.lr=1e-3"
    run = run_main(tmp_path / "run", "trainer.total_training_steps=2", rate, *overrides)
    assert_succeeded(run)
    assert steps_of(run)[-1]["rollout/probe_change"] > 0
    # in step 2 the replicas serve the weights that step 1 committed: a gap means that they were not sent
    assert run.metrics[1]["rollout/log_prob_gap_max"] <= 1e-4
    assert run.metrics[0]["actor/grad_norm"] > 0


@pytest.mark.long
def test_a_reward_that_always_fails_ends_the_run_with_its_reason_and_no_ray(tmp_path):
    (tmp_path / "reward.py").write_text(BROKEN_REWARD)
    run = run_main(
        tmp_path / "run",
        "digen.reward.functions={}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "trainer.total_training_steps=2",
    )
    assert run.exit_code != 0
    last = run.output.strip().splitlines()[-1]
    assert "the scorer is down" in last and "digen.max_refills_per_step" in last, run.output[-3000:]
    alive = subprocess.run(["pgrep", "-fc", str(tmp_path)], capture_output=True, text=True, check=False)
    assert int(alive.stdout) == 0
