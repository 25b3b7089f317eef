# SPDX-License-Identifier: Apache-2.0
"""Two devices that share every video against one, in the trainer and in a replica, through verl's main."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import (
    SEPARATE,
    Run,
    assert_same_gradients,
    assert_succeeded,
    finish_main,
    kill_one,
    run_main,
    start_main,
    steps_of,
    wait_for,
)
from tests.tiny_models import build_tiny
from tests.weight_change import SGD, assert_same_change
from verl_digen.models import load_model
from verl_digen.observe.timeline import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_STEPS = 2
SHARED = (
    "trainer.n_gpus_per_node=2",
    "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2",
)


PAIRS = ("actor_rollout_ref.rollout.n_gpus_per_node=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
"""Two replicas of two devices each, on devices of their own."""
PAIR = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")


def words(checkpoint: Path) -> tuple[str, ...]:
    """Overrides of every run."""
    return (
        *SGD,
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=true",
        "digen.sampling.num_frames=5",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=1",
    )


def run(run_dir: Path, checkpoint: Path, *overrides: str, recipe: str = SEPARATE) -> Run:
    finished = run_main(run_dir, *words(checkpoint), *overrides, recipe=recipe)
    assert_succeeded(finished)
    return finished


def whole_weights(run_dir: Path, step: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """Parameters of a checkpoint by name, put together from the ranks' shards."""
    folder = run_dir / f"global_step_{step}" / "actor"
    shards = [
        torch.load(folder / f"model_world_size_{num_ranks}_rank_{rank}.pt", weights_only=False)
        for rank in range(num_ranks)
    ]
    return {
        name: torch.cat([shard[name].to_local() for shard in shards]) if hasattr(tensor, "to_local") else tensor
        for name, tensor in shards[0].items()
    }


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny("wan2.1", tmp_path_factory.mktemp("wan") / "checkpoint")


@pytest.fixture(scope="module")
def alone(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on separate pools of one device each, in which the trainer assists."""
    return run(tmp_path_factory.mktemp("alone") / "run", checkpoint, "digen.tag.policy=always")


def start_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_model(checkpoint).load_transformer(torch.float32).state_dict()


def test_ranks_that_share_rows_train_the_weights_of_one_rank_which_continues_from_their_checkpoint(
    checkpoint: Path, alone: Run, tmp_path: Path
) -> None:
    shared = run(tmp_path / "shared", checkpoint, "digen.tag.policy=always", *SHARED)
    assert_same_gradients(alone, shared)
    assert all(row["rollout/log_prob_gap_max"] <= 1e-4 for row in steps_of(shared))
    stopped = tmp_path / "stopped"
    shutil.copytree(shared.run_dir, stopped)
    shutil.rmtree(stopped / f"global_step_{NUM_STEPS}")
    (stopped / "latest_checkpointed_iteration.txt").write_text(str(NUM_STEPS - 1))
    # two ranks on a pool of their own before, and one that generates, too, after
    moved = run(stopped, checkpoint, "trainer.resume_mode=auto", recipe="digen_flowgrpo")
    assert [row["step"] for row in steps_of(moved)] == [*range(1, NUM_STEPS + 1)]
    start, expected = start_weights(checkpoint), whole_weights(alone.run_dir, NUM_STEPS, 1)
    unequal = {"no training": start, "one update less": whole_weights(alone.run_dir, NUM_STEPS - 1, 1)}
    for finished, num_ranks in ((shared, 2), (moved, 1)):
        assert_same_change(start, expected, whole_weights(finished.run_dir, NUM_STEPS, num_ranks), unequal=unequal)


def test_replicas_of_two_devices_of_their_own_train_what_one_device_does_also_after_one_lost_a_process(
    checkpoint: Path, alone: Run, tmp_path: Path
) -> None:
    run_dir = tmp_path / "pairs"
    process = start_main(run_dir, *words(checkpoint), "digen.tag.policy=always", *PAIRS, recipe=SEPARATE)
    wait_for(process, run_dir, lambda: (run_dir / "latest_checkpointed_iteration.txt").exists())
    if process.poll() is None:
        kill_one(process, "Peer")  # step 1 has been published
    pairs = finish_main(process, run_dir)
    assert_succeeded(pairs)
    assert "replicas lost" in pairs.output
    assert_same_gradients(alone, pairs)
    steps = steps_of(pairs)
    assert all(row["rollout/log_prob_gap_max"] <= 1e-4 for row in steps), steps
    assert all(row["rollout/probe_change"] > 0 for row in steps[1:]), steps
    assert 1 in [row["rollout/num_replicas"] for row in steps], "weights were sent before the checkpoint was there"
    assert any(row["tag/assisted_samples"] > 0 for row in steps), steps
    lanes = {one.lane for one in read_timeline(run_dir / "timeline.jsonl").intervals if one.kind == "generate"}
    assert {(lane.pool, lane.num_devices) for lane in lanes} == {("generator", 2)}
    start = start_weights(checkpoint)
    assert_same_change(
        start,
        whole_weights(alone.run_dir, NUM_STEPS, 1),
        whole_weights(pairs.run_dir, NUM_STEPS, 1),
        unequal={"no training": start, "one update less": whole_weights(alone.run_dir, NUM_STEPS - 1, 1)},
    )


def test_a_replica_of_two_devices_trains_what_one_of_one_device_does(checkpoint: Path, tmp_path: Path) -> None:
    colocated = "digen_flowgrpo"
    alone = run(tmp_path / "alone", checkpoint, recipe=colocated)
    pair = run(tmp_path / "pair", checkpoint, *PAIR, recipe=colocated)
    assert_same_gradients(alone, pair)
    for row in steps_of(pair):
        assert row["rollout/num_replicas"] == 1 and row["rollout/log_prob_gap_max"] <= 1e-4
        assert row["rollout/version_lag_max_versions"] == 0
    assert all(row["rollout/probe_change"] > 0 for row in steps_of(pair)[1:])
