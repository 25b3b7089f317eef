# SPDX-License-Identifier: Apache-2.0
"""Deaths and failures in a run: it goes on without loss, or stops and can be resumed.

The user's own code makes the faults, in step 2 and once per run folder; or a signal from outside does. Two runs with
different faults end with the same weights.
"""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import (
    SEPARATE,
    Run,
    assert_every_sample_trained_once,
    assert_same_weights,
    assert_succeeded,
    finish_main,
    judged_by,
    kill_one,
    run_main,
    start_main,
    steps_of,
    wait_for,
)
from tests.e2e.moments import interfere_with_runs
from tests.reward.judges.chat_server import ChatServer
from tests.weight_change import SGD
from verl_digen.engine.driver_checkpoint import load_driver_state, load_open_prompts
from verl_digen.observe.timeline.file import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long]

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


def write_faulty(folder: Path, run_dir: Path) -> Path:
    path = folder / "faulty_user_code.py"
    path.write_text(FAULTY.format(run_dir=run_dir))
    return path


@pytest.fixture(scope="module")
def bereaved(judge: ChatServer, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that loses a replica and reward workers: two rewards with pools, a judge on a server and a function; one
    worker of the first three is killed, and of the last."""
    tmp_path = tmp_path_factory.mktemp("bereaved")
    run_dir = tmp_path / "run"
    process = start_main(
        run_dir,
        *SGD,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        f"reward.custom_reward_function.path={write_faulty(tmp_path, run_dir)}",
        "digen.reward.custom_weight=0.0",
        "digen.reward.recipe_functions.shapes.num_workers=1",
        "digen.reward.recipe_functions.shapes.max_batch_size=4",
        "digen.reward.recipe_functions.diversity={weight: 0.0, num_gpus: 0.5}",
        judged_by(judge),
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
    wait_for(process, run_dir, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    if process.poll() is None:
        kill_one(process, "DiffusersServer")  # before or while step 1 is published
        kill_one(process, "RewardPoolWorker")
    return finish_main(process, run_dir)


def test_a_dead_replica_and_dead_reward_workers_cost_time_and_no_sample(bereaved):
    run = bereaved
    assert_succeeded(run)
    assert (run.run_dir / "crash").exists(), "a reward worker was killed"
    assert "replicas lost" in run.output
    steps = steps_of(run)
    assert min(row["rollout/num_replicas"] for row in steps) == 1 and steps[-1]["rollout/num_restarts"] == 1
    assert_every_sample_trained_once(run)
    for row in steps:
        assert 0.1 < row["reward/yes_no"] < 0.9 and row["reward/yes_no/share"] == pytest.approx(0.9)
        assert row["reward_calls/diversity_samples"] == 4 and row["reward_calls/diversity_count"] == 4
        assert 4 <= row["reward_calls/shapes_count"] <= 16 and row["reward/diversity"] > 0
    lanes = {one.lane.name for one in read_timeline(run.run_dir / "timeline.jsonl").intervals if one.kind == "score"}
    assert lanes == {"reward/0", "reward/1", "reward/2", "reward/3"}


def test_an_exception_stops_the_run_and_a_resume_with_an_assisting_trainer_ends_where_a_run_without_either_does(
    bereaved, tmp_path, monkeypatch
):
    run_dir = tmp_path / "run"
    write_faulty(tmp_path, run_dir)
    # a replica that is as fast as the trainer may begin all of a batch before the trainer is free
    interfere_with_runs(monkeypatch, tmp_path, run_dir, signal.SIGKILL, sample_s=0.3)
    overrides = (
        *SGD,
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
        "trainer.resume_mode=auto",
        "actor_rollout_ref.model.external_lib=faulty_user_code",
        "digen.loss.name=overflows_once",
        "digen.tag.policy=always",
        "digen.tag.chunk_size=6",  # of two groups, where neither is begun
        "digen.gap.chunk_size=1",  # a replica that takes few samples at a time leaves most of a batch to the trainer
    )
    stopped = run_main(run_dir, *overrides, recipe=SEPARATE)
    assert stopped.exit_code != 0
    last = stopped.last_line
    assert "step 2 failed: FloatingPointError: the loss overflowed" in last, stopped.output[-3000:]
    assert "global_step_1 is saved; this continues after it: python " in last and last.endswith("resume_mode=auto")
    assert [row["step"] for row in steps_of(stopped)] == [1]
    alive = subprocess.run(["pgrep", "-fc", str(run_dir)], capture_output=True, text=True, check=False)
    assert int(alive.stdout) == 0, "no process is left"
    begun = load_open_prompts(run_dir / "global_step_1")
    assert len(begun) == 4, "the next batch, which replicas had begun"
    assert load_driver_state(run_dir / "global_step_1").num_prompts_drawn == 8
    resumed = run_main(run_dir, *overrides, recipe=SEPARATE)
    assert_succeeded(resumed)
    assert [row["step"] for row in steps_of(resumed)] == [1, 2, 3]
    assert_every_sample_trained_once(resumed)
    assert_same_weights(bereaved, resumed, 3)
    for row, other in zip(steps_of(resumed), steps_of(bereaved), strict=True):
        assert row["rollout/version_age_max_versions"] == 0 and row["rollout/log_prob_gap_max"] <= 1e-5
        for name in ("reward/mean", "reward/std", "reward/shapes"):
            assert row[name] == pytest.approx(other[name], abs=1e-3), name
    intervals = read_timeline(run_dir / "timeline.jsonl").intervals
    trained = {uid for one in intervals if (one.kind, one.step) == ("train", 2) for uid in one.group_ids}
    assert trained == {row.uid for row in begun}
    assists = [one for one in intervals if one.kind == "assist"]
    assert {(one.lane.pool, one.detail["reason"]) for one in assists} == {("trainer", "always")}
    assert max(len(one.group_ids) for one in assists) >= 2
