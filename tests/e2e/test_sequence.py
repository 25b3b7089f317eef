# SPDX-License-Identifier: Apache-2.0
"""Two ranks that share every video against one, through verl's main."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.e2e.conftest import (
    SEPARATE,
    Run,
    assert_same_gradients,
    assert_succeeded,
    run_main,
    steps_of,
    trained_weights,
)
from tests.tiny_models import build_tiny
from tests.weight_change import SGD, assert_same_change
from verl_digen.models import load_model

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

NUM_STEPS = 2
SHARED = ("trainer.n_gpus_per_node=2", "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=2")


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


def test_ranks_that_share_rows_train_the_weights_of_one_rank_which_continues_from_their_checkpoint(
    tmp_path: Path,
) -> None:
    checkpoint = build_tiny("wan2.1", tmp_path / "checkpoint")
    alone = run(tmp_path / "alone", checkpoint, "digen.tag.policy=always")  # one device in each pool
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
    start = load_model(checkpoint).load_transformer(torch.float32).state_dict()
    expected = trained_weights(alone.run_dir, NUM_STEPS)
    unequal = {"no training": start, "one update less": trained_weights(alone.run_dir, NUM_STEPS - 1)}
    for finished in (shared, moved):
        assert_same_change(start, expected, trained_weights(finished.run_dir, NUM_STEPS), unequal=unequal)
