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

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STOPS = '''
"""Stops one process of a run at an exact moment, once per moment; Python imports this at the start of every process."""

import os
import signal
import time
from pathlib import Path

from verl_digen.hooks import after_import

RUN_DIR = Path("{run_dir}")
MOMENTS = {moments}


def step():
    """The step under way, of a run that saves after each."""
    pointer = RUN_DIR / "latest_checkpointed_iteration.txt"
    return int(pointer.read_text()) + 1 if pointer.exists() else 1


def stop_if_due(moment):
    if moment not in MOMENTS or step() < MOMENTS[moment]:
        return
    try:
        (RUN_DIR / f"stopped_in_{{moment}}").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_replicas():
    from verl_digen.rollout.server import DiffusersServer

    ready, generate, activate = DiffusersServer.ready, DiffusersServer._generate, DiffusersServer.activate_weights

    async def note_start(self):
        (RUN_DIR / f"started_{{os.getpid()}}").touch()
        return await ready(self)

    def stop_and_generate(self, requests, should_stop):
        stop_if_due("validation" if requests[0].uid.startswith("val") else "generation")
        return generate(self, requests, should_stop)

    async def stop_and_activate(self):
        stop_if_due("load")
        return await activate(self)

    DiffusersServer.ready = note_start
    DiffusersServer._generate, DiffusersServer.activate_weights = stop_and_generate, stop_and_activate


def stop_ranks():
    from verl_digen.engine.worker import DiffusionWorker

    accumulate = DiffusionWorker.accumulate

    def stop_and_accumulate(self, *args, **kwargs):
        stop_if_due("training")
        return accumulate(self, *args, **kwargs)

    stop_and_accumulate.__dict__.update(accumulate.__dict__)  # how verl dispatches it
    DiffusionWorker.accumulate = stop_and_accumulate


after_import("verl_digen.rollout.server", stop_replicas)
after_import("verl_digen.engine.worker", stop_ranks)


def compute_score(data_source, solution_image, ground_truth, extra_info=None):
    """Slow down the steps after the one in which a replica was lost, until another one has started in its place.

    A batch begins before the step before is saved: the replica that stops in step 2's time generates for step 3.
    """
    while len(list(RUN_DIR.glob("started_*"))) < {{4: 3, 6: 4}}.get(step(), 0):
        time.sleep(0.1)
    return 0.0
'''


def has_row(metrics: Path, text: str) -> bool:
    return metrics.exists() and text in metrics.read_text()


def write_stops(folder: Path, run_dir: Path, **moments: int) -> Path:
    """Code of the user that stops a process at each of `moments`, from a step on."""
    path = folder / "sitecustomize.py"
    path.write_text(STOPS.format(run_dir=run_dir, moments=moments))
    return path


def test_replicas_that_are_stopped_in_a_chunk_a_load_and_a_validation_are_replaced(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    path = write_stops(tmp_path, run_dir, generation=2, load=4, validation=6)
    run = run_main(
        run_dir,
        "trainer.total_training_steps=7",
        "trainer.save_freq=1",
        "trainer.test_freq=6",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={path}",
        "digen.reward.custom_weight=0.0",
        # also the time after which a replica that is stopped in its first validation is replaced
        "digen.deadlines.first_s=120",
        "digen.deadlines.generate_s=20",
        "digen.deadlines.load_s=20",
        "digen.deadlines.answer_s=15",
        recipe=SEPARATE,
        timeout_s=800,
    )
    assert_succeeded(run)
    for moment in ("generation", "load", "validation"):
        assert (run_dir / f"stopped_in_{moment}").exists()
    assert_every_sample_trained_once(run)
    steps = steps_of(run)
    assert len(list(run_dir.glob("started_*"))) >= 4, "two came up in the place of those that were lost first"
    assert steps[-1]["rollout/num_restarts"] == 3
    assert all(row["val/failed_samples"] == 0 for row in run.metrics if "val/failed_samples" in row)


def test_a_trainer_rank_that_is_stopped_ends_the_run_with_the_way_to_resume(tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    write_stops(tmp_path, run_dir, training=2)
    run = run_main(
        run_dir,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "digen.deadlines.first_s=300",
        "digen.deadlines.train_s=20",
        "digen.deadlines.abort_s=5",
        recipe=SEPARATE,
    )
    assert run.exit_code != 0 and (run_dir / "stopped_in_training").exists()
    last = run.output.strip().splitlines()[-1]
    assert "step 2: training fragment" in last and "has not been answered for" in last, run.output[-3000:]
    assert "raise digen.deadlines." in last and "the checkpoint of step 1 is intact" in last


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
        "digen.deadlines.blip_s=5",
    )
    wait_for(process, run_dir, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    metrics, moments = run_dir / "metrics.jsonl", random.Random(7)
    for number in range(1, 6):
        kill_one(process, "DiffusersServer")
        replaced = f'"rollout/num_restarts": {number}.0, "rollout/num_replicas": 2.0'
        wait_for(process, run_dir, partial(has_row, metrics, replaced))
        time.sleep(2 * moments.random())
    kill_one(process, "TransferQueueController", signal.SIGSTOP)
    run = finish_main(process, run_dir)
    said = run.output[-5000:]
    assert run.exit_code != 0, said
    last = run.output.strip().splitlines()[-1]
    assert "TransferQueue's controller gives no sign of life for 15 s (digen.deadlines.answer_s)" in last, said
    # it may be that of a step that has no metrics yet
    saved = (run_dir / "latest_checkpointed_iteration.txt").read_text()
    assert f"the checkpoint of step {saved} is intact" in last and "trainer.resume_mode=auto" in last, said
