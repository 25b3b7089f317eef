# SPDX-License-Identifier: Apache-2.0
"""Objectives of finished pictures through verl's own main: samples of the old policy, no recorded path, in both
placements; DGPO's groups with every scheduling technique at once."""

import signal

import pytest
import torch

from tests.e2e.conftest import assert_same_gradients, assert_same_weights, run_main, steps_of, trained_weights
from tests.e2e.moments import interfere_with_runs
from tests.e2e.test_training import assert_succeeded
from tests.weight_change import SGD

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NFT = (
    *SGD,
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "digen.advantage.scale=group",
)


@pytest.mark.grid
def test_separate_pools_with_assisting_trainers_leave_the_weights_of_the_colocated_trainer(tmp_path):
    one = run_main(tmp_path / "colocated", *NFT, recipe="[digen_flowgrpo,nft]")
    assert_succeeded(one)
    other = run_main(
        tmp_path / "separate", *NFT, "digen.tag.policy=always", recipe="[digen_flowgrpo,disaggregated,nft]"
    )
    assert_succeeded(other)
    assert_same_weights(one, other, 2)
    assert_same_gradients(one, other)
    assert sum(row["tag/assisted_samples"] for row in steps_of(other)) > 0
    for run in (one, other):
        assert all(row["actor/old_distance"] == 0 for row in steps_of(run)[:1]), "nothing has moved yet"
        assert all(row["actor/old_distance"] > 0 for row in steps_of(run)[1:])
        assert steps_of(run)[-1]["val/reward"] > 0
    old = [trained_weights(run.run_dir, 2, "old") for run in (one, other)]
    for name, shard in old[0].items():
        torch.testing.assert_close(old[1][name], shard, rtol=1e-3, atol=1e-5)


def test_dgpo_trains_groups_on_separate_pools_with_assistance_and_stale_samples(tmp_path, monkeypatch):
    """Replicas begin the next batch while the trainer has the open gradient of groups that are complete."""
    interfere_with_runs(monkeypatch, tmp_path, tmp_path / "run", signal.SIGKILL, sample_s=0.2)
    run = run_main(
        tmp_path / "run",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.rollout.n=3",
        "actor_rollout_ref.model.lora_rank=4",
        "digen.forward.num_points=2",
        "digen.advantage.scale=group",
        "digen.tag.policy=always",
        "digen.tag.chunk_size=1",
        "digen.staleness.max_versions=1",
        "digen.staleness.fraction=0.5",
        recipe="[digen_flowgrpo,disaggregated,dgpo]",
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert len(steps) == 3
    for row in steps:
        assert row["batch/num_samples"] == 12 and row["actor/num_rows"] == 12 * 2
        assert row["rollout/version_age_max_versions"] <= 1 and row["batch/late_samples"] == 0
        assert 0 < row["actor/group_weight"] < 1 and row["actor/grad_norm"] > 0
    assert steps[0]["actor/group_weight"] == 0.5, "the policy is the reference"
    # a driver that is late finds all groups of a batch complete, and trains them as one fragment
    assert max(row["actor/num_fragments"] for row in steps) > 1
    assert sum(row["tag/assisted_samples"] for row in steps) > 0
    assert sum(row.get("staleness/samples_1_versions", 0) for row in steps) > 0
