# SPDX-License-Identifier: Apache-2.0
"""Processes of a run that stop answering: they are replaced, or the run ends with the reason.

Their deadlines are long enough for two other runs on the same slow cores.
"""

import random
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from tests.e2e.conftest import (
    SEPARATE,
    assert_every_sample_trained_once,
    assert_succeeded,
    finish_main,
    kill_one,
    run_main,
    start_main,
    steps_of,
    wait_for,
)
from tests.e2e.moments import interfere_with_runs

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

SLOW_REWARD = """
import re
import time
from pathlib import Path

RUN_DIR = Path({run_dir!r})


def num_restarts():
    metrics = RUN_DIR / "metrics.jsonl"
    counts = re.findall(r'"rollout/num_restarts": (\\d)', metrics.read_text()) if metrics.exists() else ()
    return max(map(int, counts), default=0)


def compute_score(data_source, solution_image, ground_truth, extra_info=None):
    while len(list(RUN_DIR.glob("started_*"))) < 2 + num_restarts():
        time.sleep(0.1)
    return 0.0
"""
"""Slows down the steps after the one in which a replica was lost, until another one has started in its place."""


def has_row(metrics: Path, text: str) -> bool:
    return metrics.exists() and text in metrics.read_text()


def test_replicas_that_are_stopped_in_a_chunk_a_load_and_a_validation_are_replaced(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    interfere_with_runs(monkeypatch, tmp_path, run_dir, signal.SIGSTOP, generation=2, load=4, validation=6)
    (tmp_path / "reward.py").write_text(SLOW_REWARD.format(run_dir=str(run_dir)))
    run = run_main(
        run_dir,
        "trainer.total_training_steps=9",
        "trainer.save_freq=1",
        "trainer.test_freq=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "digen.reward.custom_weight=0.0",
        # also the time after which a replica that is stopped in its first validation is replaced
        "digen.deadlines.first_s=120",
        "digen.deadlines.answer_s=20",
        recipe=SEPARATE,
        timeout_s=1800,
    )
    assert_succeeded(run)
    for moment in ("generation", "load", "validation"):
        assert (run_dir / f"signalled_in_{moment}").exists()
    assert_every_sample_trained_once(run)
    steps = steps_of(run)
    assert len(list(run_dir.glob("started_*"))) >= 4, "two came up in the place of those that were lost first"
    assert steps[-1]["rollout/num_restarts"] == 3
    assert all(row["val/failed_samples"] == 0 for row in run.metrics if "val/failed_samples" in row)


def test_a_trainer_rank_that_is_stopped_ends_the_run_with_the_way_to_resume(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    interfere_with_runs(monkeypatch, tmp_path, run_dir, signal.SIGSTOP, training=2)
    run = run_main(
        run_dir,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "digen.deadlines.first_s=300",
        "digen.deadlines.train_s=20",
        "digen.deadlines.answer_s=15",
        recipe=SEPARATE,
    )
    assert run.exit_code != 0 and (run_dir / "signalled_in_training").exists()
    last = run.last_line
    assert "step 2: training fragment" in last and "has not been answered for" in last, run.output[-3000:]
    assert "raise digen.deadlines." in last and "global_step_1 is saved; this continues after it: python " in last


def test_a_colocated_run_replaces_dead_replicas_and_ends_with_a_reason_when_transfer_queue_hangs(tmp_path):
    """Replicas are killed at any moment of a step: in a batch, asleep, on the way there, in a weight update."""
    run_dir = tmp_path / "run"
    process = start_main(
        run_dir,
        "trainer.total_training_steps=1000",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.n_gpus_per_node=2",
        "digen.deadlines.answer_s=15",
    )
    wait_for(process, run_dir, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    metrics, moments = run_dir / "metrics.jsonl", random.Random(7)
    for number in range(1, 4):
        kill_one(process, "DiffusersServer")
        replaced = f'"rollout/num_restarts": {number}.0, "rollout/num_replicas": 2.0'
        wait_for(process, run_dir, partial(has_row, metrics, replaced))
        time.sleep(2 * moments.random())
    kill_one(process, "TransferQueueController", signal.SIGSTOP)
    run = finish_main(process, run_dir)
    said = run.output[-5000:]
    assert run.exit_code != 0, said
    last = run.last_line
    assert "TransferQueue's controller gives no sign of life for 15 s (digen.deadlines.answer_s)" in last, said
    # it may be that of a step that has no metrics yet
    saved = (run_dir / "latest_checkpointed_iteration.txt").read_text()
    assert f"global_step_{saved} is saved; this continues after it: python " in last, said
    assert last.endswith("trainer.resume_mode=auto"), said
