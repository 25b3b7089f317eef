# SPDX-License-Identifier: Apache-2.0
"""Deaths and failures in a run: it goes on without loss, or stops and can be resumed.

The user's own code makes the faults, in step 2 and once per run folder; or a signal from outside does.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import SEPARATE, Run, assert_same_weights, finish_main, kill_one, run_main, start_main, steps_of
from tests.e2e.test_training import assert_succeeded
from tests.weight_change import SGD
from verl_digen.observe.timeline import read_timeline

# in one process, where files run side by side: its tests share a run
pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.xdist_group("faults")]

FAULTY = '''
import os
import signal
from pathlib import Path

from verl_digen.algorithms.objectives import ClipConfig, register_objective
from verl_digen.algorithms.objectives.flow_grpo import clipped_ratio

RUN_DIR = Path("{run_dir}")


def is_due(fault):
    """Whether step 1 is saved, for the first time that it is asked for `fault`."""
    if not (RUN_DIR / "latest_checkpointed_iteration.txt").exists() or (RUN_DIR / fault).exists():
        return False
    (RUN_DIR / fault).touch()
    return True


@register_objective(
    "overflows_once", config=ClipConfig, columns=("log_prob", "old_log_prob", "advantage"), homogeneous=True
)
def overflows_once(rows, config):
    if is_due("first_call"):
        return clipped_ratio(rows, config)
    if (RUN_DIR / "first_call").exists() and is_due("overflow"):
        raise FloatingPointError("the loss overflowed")
    return clipped_ratio(rows, config)


def compute_score(data_source, solution_image, ground_truth, extra_info=None):
    if is_due("crash"):
        os.kill(os.getpid(), signal.SIGKILL)
    return 0.0
'''

STOPS = '''
"""Stops one process of a run at an exact moment, once per moment; Python imports this at the start of every process."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
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
    """Slow down the steps after the one in which a replica was stopped, until another one has started in its place."""
    num_stopped = sum((RUN_DIR / f"stopped_in_{{moment}}").exists() for moment in ("generation", "load"))
    if step() in (3, 5):
        while len(list(RUN_DIR.glob("started_*"))) < 2 + min(num_stopped, step() // 2):
            time.sleep(0.1)
    return 0.0
'''

NUM_SAMPLES = 16


def write_faulty(folder: Path, run_dir: Path) -> Path:
    path = folder / "faulty_user_code.py"
    path.write_text(FAULTY.format(run_dir=run_dir))
    return path


def write_stops(folder: Path, run_dir: Path, **moments: int) -> Path:
    """Code of the user that stops a process at each of `moments`, from a step on."""
    path = folder / "sitecustomize.py"
    path.write_text(STOPS.format(run_dir=run_dir, moments=moments))
    return path


def assert_every_sample_trained_once(run: Run) -> None:
    for row in steps_of(run):
        assert row["batch/num_samples"] == NUM_SAMPLES
    timeline = read_timeline(run.run_dir / "timeline.jsonl")
    for step in timeline.steps:
        trained = [interval for interval in timeline.intervals if (interval.step, interval.kind) == (step, "train")]
        groups = [uid for interval in trained for uid in interval.group_ids]
        assert len(groups) == len(set(groups)) == 4
        assert sum(interval.num_samples for interval in trained) == NUM_SAMPLES


def test_a_dead_replica_and_a_dead_reward_worker_cost_time_and_no_sample(separate, tmp_path):
    run_dir = tmp_path / "run"
    process = start_main(
        run_dir,
        *SGD,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={write_faulty(tmp_path, run_dir)}",
        "digen.reward.custom_weight=0.0",
        # a cluster of two types, so that processes that come back find their place too
        "+ray_kwargs.ray_init.resources={H100: 1, L40S: 1}",
        "digen.placement.trainer_accelerator=H100",
        "digen.placement.generator_accelerator=L40S",
        "digen.placement.reward_accelerator=L40S",
        "reward.reward_model.enable_resource_pool=true",
        "reward.reward_model.nnodes=1",
        "reward.reward_model.n_gpus_per_node=1",
        recipe=SEPARATE,
    )
    wait_for(process, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    if process.poll() is None:
        kill_one(process, "DiffusersServer")  # before or while step 1 is published
    run = finish_main(process, run_dir)
    assert_succeeded(run)
    assert (run_dir / "crash").exists(), "a reward worker was killed"
    assert "replicas lost" in run.output
    steps = steps_of(run)
    assert min(row["rollout/num_replicas"] for row in steps) == 1 and steps[-1]["rollout/num_restarts"] == 1
    assert_every_sample_trained_once(run)
    assert_same_weights(separate, run, 3)


def test_an_exception_in_training_stops_the_run_and_a_resume_ends_where_it_would_have(separate, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    write_faulty(tmp_path, run_dir)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    overrides = (
        *SGD,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "actor_rollout_ref.model.external_lib=faulty_user_code",
        "digen.loss.name=overflows_once",
    )
    stopped = run_main(run_dir, *overrides, recipe=SEPARATE)
    assert stopped.exit_code != 0
    last = stopped.output.strip().splitlines()[-1]
    assert "step 2 failed: FloatingPointError: the loss overflowed" in last, stopped.output[-3000:]
    assert "checkpoint of step 1 is intact" in last and "trainer.resume_mode=auto" in last
    assert [row["step"] for row in steps_of(stopped)] == [1]
    resumed = run_main(run_dir, *overrides, recipe=SEPARATE)
    assert_succeeded(resumed)
    assert [row["step"] for row in steps_of(resumed)] == [1, 2, 3]
    assert_every_sample_trained_once(resumed)
    assert_same_weights(separate, resumed, 3)


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
        "digen.deadlines.first_s=90",
        "digen.deadlines.generate_s=12",
        "digen.deadlines.load_s=12",
        "digen.deadlines.answer_s=10",
        recipe=SEPARATE,
        timeout_s=800,
    )
    assert_succeeded(run)
    for moment in ("generation", "load", "validation"):
        assert (run_dir / f"stopped_in_{moment}").exists()
    assert_every_sample_trained_once(run)
    steps = steps_of(run)
    assert [row["rollout/num_replicas"] for row in steps][4] == 2, "one was replaced"
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
        "digen.deadlines.first_s=90",
        "digen.deadlines.train_s=20",
        "digen.deadlines.abort_s=5",
        recipe=SEPARATE,
    )
    assert run.exit_code != 0 and (run_dir / "stopped_in_training").exists()
    last = run.output.strip().splitlines()[-1]
    assert "step 2: training fragment" in last and "has not been answered for" in last, run.output[-3000:]
    assert "raise digen.deadlines." in last and "the checkpoint of step 1 is intact" in last


def test_a_colocated_run_replaces_a_dead_replica_and_ends_with_a_reason_when_transfer_queue_hangs(tmp_path):
    run_dir = tmp_path / "run"
    process = start_main(
        run_dir,
        "trainer.total_training_steps=1000",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        "trainer.n_gpus_per_node=2",
        "digen.deadlines.answer_s=5",
        "digen.deadlines.blip_s=1",
    )
    wait_for(process, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    kill_one(process, "DiffusersServer")
    metrics = run_dir / "metrics.jsonl"
    wait_for(process, lambda: metrics.exists() and '"rollout/num_restarts": 1.0' in metrics.read_text())
    kill_one(process, "TransferQueueController", signal.SIGSTOP)
    run = finish_main(process, run_dir)
    steps = steps_of(run)
    after = next(row for row in steps if row["rollout/num_restarts"] == 1)
    assert after["rollout/num_replicas"] == 2, "it was replaced"
    assert run.exit_code != 0
    last = run.output.strip().splitlines()[-1]
    assert "TransferQueue's controller gives no sign of life for 5 s (digen.deadlines.answer_s)" in last, run.output[
        -3000:
    ]
    assert f"the checkpoint of step {steps[-1]['step']:.0f} is intact" in last and "trainer.resume_mode=auto" in last


def wait_for(process: subprocess.Popen[bytes], is_there: Callable[[], bool]) -> None:
    while process.poll() is None and not is_there():
        time.sleep(0.05)
