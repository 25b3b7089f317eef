# SPDX-License-Identifier: Apache-2.0
"""A program that constructs verl's RayPPOTrainer itself, with our subclass in its place."""

import inspect

import numpy as np
import pytest
import torch
import transfer_queue
from hydra import compose, initialize_config_module
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import trainer_base

from verl_digen import facade
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.config import digen_config
from verl_digen.facade import DECIDED_BY, RayFlowGRPOTrainer
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.disaggregated import DisaggregatedTrainer


@pytest.fixture
def started(monkeypatch):
    """Configs of TransferQueue that were started."""
    found = []
    monkeypatch.setattr(transfer_queue, "init", found.append)
    return found


def composed(*overrides):
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


def test_the_config_is_checked_before_anything_starts(started):
    config = composed("recipe=digen_quickstart", "actor_rollout_ref.rollout.n=1")
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.rollout\.n must be >= 2"):
        RayFlowGRPOTrainer(config)
    assert started == []


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [("digen_quickstart", ColocatedTrainer), ("digen_quickstart+disaggregated", DisaggregatedTrainer)],
)
def test_the_trainer_is_the_one_that_trainer_mode_names(started, monkeypatch, tmp_path, recipe, kind):
    monkeypatch.setattr(kind, "__init__", lambda self, config: None)
    monkeypatch.setattr(facade, "start", started.append)
    trainer = RayFlowGRPOTrainer(
        composed(f"recipe={recipe}", f"trainer.default_local_dir={tmp_path}"),  # held until the trainer is collected
        device_name="cpu",
    )
    assert type(trainer._trainer) is trainer_base.get_trainer_cls(trainer.config.trainer.v1.trainer_mode) is kind
    assert len(started) == 1


def test_the_steps_by_hand_are_those_of_one_pool(monkeypatch):
    trainer = RayFlowGRPOTrainer.__new__(RayFlowGRPOTrainer)
    trainer.config = composed("recipe=digen_quickstart+disaggregated")
    trainer._trainer = DisaggregatedTrainer.__new__(DisaggregatedTrainer)
    with pytest.raises(ValueError, match=r"must be digen_colocated where the steps .* got 'digen_disaggregated'"):
        trainer.next_prompts()


def by_hand(*overrides):
    """A trainer on one pool that was not started."""
    trainer = RayFlowGRPOTrainer.__new__(RayFlowGRPOTrainer)
    trainer.config = composed("recipe=digen_quickstart", *overrides)
    trainer._trainer = ColocatedTrainer.__new__(ColocatedTrainer)
    trainer._trainer.digen = digen_config(trainer.config)
    return trainer


def scored(rewards, uids):
    tensors = TensorDict({"rm_scores": torch.tensor(rewards).unsqueeze(1)}, batch_size=len(rewards))
    return DataProto(tensors, {"uid": np.array(uids, dtype=object)})


def test_advantages_by_hand_select_the_samples_that_the_run_would_train():
    batch = scored([0.1, 0.9, 0.5, 0.2, 0.7, 0.3], ["a", "a", "a", "b", "b", "b"])
    found = by_hand().compute_advantage(batch).batch
    assert found["selected"].all() and found["advantages"].shape == (6, 1)
    expected = group_advantages(batch.batch["rm_scores"][:, 0], list(batch.non_tensor_batch["uid"]))
    assert torch.equal(found["advantages"][:, 0], expected)
    found = by_hand("digen.advantage.best_of=2").compute_advantage(batch).batch
    assert found["selected"][:, 0].tolist() == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    "words",
    [("digen.reward.combine=gdpo",), ("digen.branches.splits=[1]", "digen.sampling.shared_initial_noise=true")],
    ids=["gdpo", "tree"],
)
def test_advantages_that_are_not_made_of_one_reward_or_one_path_are_left_to_fit(words):
    with pytest.raises(ValueError, match=rf"{words[0].partition('=')[0]} must be .* here, got .*; call fit"):
        by_hand(*words).compute_advantage(scored([0.1, 0.9], ["a", "a"]))


def test_the_signature_is_verls_and_what_is_not_used_is_refused_by_name(started):
    ours, verls = (inspect.signature(kind.__init__) for kind in (RayFlowGRPOTrainer, RayPPOTrainer))
    assert list(ours.parameters) == list(verls.parameters)
    assert set(DECIDED_BY) == set(ours.parameters) - {"self", "config", "device_name"}
    config = composed("recipe=digen_quickstart")
    for name, decides in DECIDED_BY.items():
        with pytest.raises(ValueError, match="must be given only the config") as refused:
            RayFlowGRPOTrainer(config, **{name: object()})
        assert f"got '{name}'; leave out {name}: {decides}" in str(refused.value)
    with pytest.raises(ValueError, match=r"got 'tokenizer, train_dataset'; leave out tokenizer: .*; and train_dataset"):
        RayFlowGRPOTrainer(config, "tokenizer", train_dataset=[])
    assert started == []
