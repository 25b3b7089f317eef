# SPDX-License-Identifier: Apache-2.0
"""The class names of verl's RFC for diffusion FlowGRPO, each a subclass of the verl class it extends."""

import importlib
import inspect

import pytest
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopWorker
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica

NAMES = {
    "verl_digen.facade:RayFlowGRPOTrainer": RayPPOTrainer,
    "verl_digen.agent_loop.manager:DiffusionAgentLoopWorker": AgentLoopWorker,
    "verl_digen.agent_loop.single_turn:DiffusionSingleTurnAgentLoop": AgentLoopBase,
    "verl_digen.agent_loop.server_manager:AsyncDiffusionServerManager": LLMServerClient,
    "verl_digen.agent_loop.server_manager:DiffusionServerManager": LLMServerManager,
    "verl_digen.reward.manager:DiffusionRewardLoopManager": RewardLoopManager,
    "verl_digen.reward.manager:DiffusionRewardLoopWorker": RewardLoopWorker,
    "verl_digen.reward.manager:DiffusionRewardManager": RewardManagerBase,
    "verl_digen.engine.engine:DiffusersFSDPEngine": FSDPEngine,
    "verl_digen.rollout.replica:DiffusersReplica": RolloutReplica,
}


@pytest.mark.parametrize("target", NAMES)
def test_public_classes_extend_verls(target):
    import verl_digen.trainer.register  # noqa: F401 - the order in which verl imports us

    module, _, name = target.partition(":")
    assert issubclass(getattr(importlib.import_module(module), name), NAMES[target])


def test_verl_calls_the_hooks_of_a_step_that_we_replace():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    source = inspect.getsource(PPOTrainer.fit)
    for name in ("step", "on_step_end", "_validate", "_save_checkpoint", "_compute_metrics"):
        assert f"self.{name}(" in source
    assert "reward.num_workers" in inspect.getsource(RewardLoopManager), "0 workers lets us build our own"
