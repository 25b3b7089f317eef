# SPDX-License-Identifier: Apache-2.0
"""A run whose model, objective and reward are in a module outside the repository."""

import os
import subprocess
import sys

import pytest

from tests import own_parts
from tests.e2e.conftest import CHECKPOINT, assert_succeeded, run_main, steps_of
from verl_digen.user_modules import KEY

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]


def test_a_users_own_model_objective_and_reward_train_and_are_sampled(tmp_path, monkeypatch):
    own_parts.write_modules(tmp_path)
    checkpoint = own_parts.write_checkpoint(tmp_path / "checkpoint", CHECKPOINT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    run = run_main(
        tmp_path / "run",
        f"{KEY}={own_parts.NAME}",
        f"actor_rollout_ref.model.path={checkpoint}",
        "digen.loss.name=own_loss",
        "digen.reward.recipe_functions={own_reward: {weight: 1.0, num_workers: 1, max_batch_size: 4}}",
        "trainer.total_training_steps=1",
        "trainer.save_freq=1",
    )
    assert_succeeded(run)
    (step,) = steps_of(run)
    assert step["actor/grad_norm"] > 0 and 0 < step["reward/own_reward"] < 1
    code = "import sys; from verl_digen.cli import main; sys.exit(main())"
    words = ["sample", str(run.run_dir), "--prompt", "a red circle"]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env=os.environ, capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
