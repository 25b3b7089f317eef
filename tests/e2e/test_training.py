# SPDX-License-Identifier: Apache-2.0
import shutil
import subprocess

import pytest

from tests.e2e.conftest import Run, run_main, steps_of, trained_weights

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


def test_a_resumed_run_continues_as_if_it_had_not_stopped(tmp_path):
    common = (
        "trainer.total_training_steps=6",
        "trainer.save_freq=3",
        "digen.ema.enable=true",
        "digen.ema.every_steps=2",
    )
    whole = run_main(tmp_path / "whole", *common)
    assert_succeeded(whole)
    halves = tmp_path / "halves"
    shutil.copytree(whole.run_dir, halves)
    shutil.rmtree(halves / "global_step_6")
    (halves / "latest_checkpointed_iteration.txt").write_text("3")
    resumed = run_main(halves, *common, "trainer.resume_mode=auto")
    assert_succeeded(resumed)
    assert [row["step"] for row in resumed.metrics] == [1, 2, 3, 4, 5, 6]
    expected, got = trained_weights(whole.run_dir, 6), trained_weights(halves, 6)
    assert expected.keys() == got.keys()
    start = trained_weights(whole.run_dir, 3)
    moved = max((expected[name] - start[name]).abs().max().item() for name in expected)
    gap = max((expected[name] - got[name]).abs().max().item() for name in expected)
    assert moved > 1e-5, "the last three steps changed the weights"
    assert gap <= 1e-7, f"resumed weights differ by {gap}, three steps moved them by {moved}"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("trainer.n_gpus_per_node=2", "actor_rollout_ref.model.lora_rank=4", "digen.kl.coef=0.01"),
            id="two ranks, LoRA adapter",
        ),
        pytest.param(
            ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora.merge=true", "digen.kl.coef=0.01"),
            id="LoRA merged",
            marks=pytest.mark.long,
        ),
        pytest.param(
            (
                *("digen.kl.coef=0.01", "digen.sampling.guidance_scale=2.0"),
                "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            ),
            id="full weights, guided, two updates per batch",
            marks=pytest.mark.long,
        ),
    ],
)
def test_variants_train_and_generation_agrees_with_training(tmp_path, overrides):
    run = run_main(tmp_path / "run", "trainer.total_training_steps=2", *overrides)
    assert_succeeded(run)
    # in step 2 the replicas serve the weights that step 1 committed: a gap means that they were not sent
    assert run.metrics[1]["rollout/log_prob_gap_max"] <= 1e-4
    assert run.metrics[0]["actor/grad_norm"] > 0


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
