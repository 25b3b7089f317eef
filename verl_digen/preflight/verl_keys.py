# SPDX-License-Identifier: Apache-2.0
"""Rules for the installation, the `digen:` section, batches that divide, and classes that verl loads by name."""

from __future__ import annotations

import importlib

from omegaconf import DictConfig, OmegaConf

from verl_digen import plugin
from verl_digen.config import digen_config
from verl_digen.pool_sizes import ROLLOUT, num_trainer_devices
from verl_digen.require import refusing, require, suggestion


def check_plugin(config: DictConfig) -> None:
    """Require everything we add to verl to be registered in this process."""
    if plugin.FAILURES:
        raise ValueError(
            f"verl-digen is not installed as it should be: {'; '.join(plugin.FAILURES)}; "
            "run `digen doctor`, which says what is missing and how to get it"
        )


def check_digen(config: DictConfig) -> None:
    """Validate the `digen:` section by itself."""
    digen_config(config)


def check_shards(config: DictConfig) -> None:
    """Require that ranks divide into groups that shard the weights, each of which holds all of them, and into groups
    that share rows."""
    size, ranks = config.actor_rollout_ref.actor.fsdp_config.fsdp_size, num_trainer_devices(config)
    require(
        size == -1 or size >= ranks or ranks % size == 0,
        f"actor_rollout_ref.actor.fsdp_config.fsdp_size must divide the trainer's ranks ({ranks})",
        size,
        "-1 shards over all ranks",
    )
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    require(
        ranks % sharing == 0,
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size must divide the trainer's ranks "
        f"({ranks}): that many ranks share a row",
        sharing,
        "change it, or trainer.nnodes x trainer.n_gpus_per_node",
    )


def check_optimizer(config: DictConfig) -> None:
    """Require the optimizer's class to exist, and a schedule that reads its settings."""
    key, optim = "actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim
    for name, default in (("min_lr_ratio", 0.0), ("num_cycles", 0.5)):
        require(
            optim.lr_scheduler_type == "cosine" or optim[name] in (default, None),
            f"{key}.{name} must be left out with {key}.lr_scheduler_type={optim.lr_scheduler_type}, which reads none",
            optim[name],
            f"set {key}.lr_scheduler_type=cosine",
        )
    module, name = optim.optimizer_impl, optim.optimizer
    remedy = "torch.optim is the default, others must be installed"
    with refusing(f"{key}.optimizer_impl must be a module that can be imported", module, remedy):
        found = importlib.import_module(module)
    names = [one for one, value in vars(found).items() if isinstance(value, type)]
    require(
        isinstance(getattr(found, name, None), type),
        f"{key}.optimizer must be a class of {key}.optimizer_impl={module}",
        name,
        f"{suggestion(name, names)}AdamW is usual",
    )


def check_callback(config: DictConfig) -> None:
    """Require that the class that is called after a checkpoint can be imported."""
    from verl.utils.import_utils import load_class_from_fqn

    key, name = "trainer.checkpoint_callback_class", config.trainer.checkpoint_callback_class
    with refusing(f"{key} must be a class that can be imported", name, "give package.module.Class, or null"):
        if name:
            load_class_from_fqn(name, "CheckpointCallback")


def check_batches(config: DictConfig) -> None:
    """Require prompts to divide into mini-batches as verl divides them, and groups as large as what trains of them."""
    num_prompts, group_size = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_batch = config.actor_rollout_ref.actor.ppo_mini_batch_size
    best_of = digen_config(config).advantage.best_of
    require(
        best_of is None or best_of <= group_size,
        f"digen.advantage.best_of must be <= actor_rollout_ref.rollout.n={group_size}",
        best_of,
        "null trains all samples",
    )
    require(
        num_prompts % mini_batch == 0,
        f"actor_rollout_ref.actor.ppo_mini_batch_size must divide data.train_batch_size={num_prompts}",
        mini_batch,
        "leave it alone for one optimizer step per batch",
    )


CLASSES = {
    "data.custom_cls.path": "pkg://verl_digen.data.dataset",
    "data.custom_cls.name": "DiffusionPromptDataset",
    "trainer.v1.sampler.custom_sampler.path": "pkg://verl_digen.trainer.replay_buffer",
    "trainer.v1.sampler.custom_sampler.name": "GroupReplayBuffer",
    f"{ROLLOUT}.agent.agent_loop_manager_class": "verl_digen.agent_loop.manager.DiffusionAgentLoopManager",
    "reward.reward_manager.module.path": "pkg://verl_digen.reward.manager",
    "reward.reward_manager.name": "DiffusionRewardManager",
}
"""Key with which verl names a class -> its value in the recipes."""


def check_classes(config: DictConfig) -> None:
    """Require our classes where verl loads one by name."""
    for key, ours in CLASSES.items():
        given = OmegaConf.select(config, key, throw_on_missing=True)
        require(given == ours, f"{key} must be {ours}", given, "leave it to the recipes")
