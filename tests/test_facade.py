# SPDX-License-Identifier: Apache-2.0
import pytest
import transfer_queue
from hydra import compose, initialize_config_module

from verl_digen.facade import RayFlowGRPOTrainer


def test_a_pipeline_of_ones_own_is_checked_before_anything_starts(monkeypatch):
    started = []
    monkeypatch.setattr(transfer_queue, "init", started.append)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=["recipe=digen_quickstart", "actor_rollout_ref.rollout.n=1"])
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.n must be >= 2"):
        RayFlowGRPOTrainer(config)
    assert started == []
