# SPDX-License-Identifier: Apache-2.0
"""Rules for the installation, the `digen:` section, batches that divide, and classes that verl loads by name: the
recipes name ours, and another one must be a subclass of it."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from verl.utils.import_utils import load_class_from_fqn, load_extern_object
from verl.workers.config.optimizer import build_optimizer

from verl_digen import plugin
from verl_digen.config.pool_sizes import num_trainer_devices
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import refusing, require, require_one_of, suggestion


def check_plugin(run: StartConfig) -> None:
    """Require everything we add to verl to be registered in this process."""
    if plugin.FAILURES:
        raise ValueError(
            f"verl-digen is not installed as it should be: {'; '.join(plugin.FAILURES)}; "
            "run `digen doctor`, which says what is missing and how to get it"
        )


def check_digen(run: StartConfig) -> None:
    """Validate the `digen:` section by itself."""
    _ = run.digen  # it raises


def check_shards(run: StartConfig) -> None:
    """Require that ranks divide into groups that share one copy of the weights, and into groups that share rows."""
    size, ranks = run.config.actor_rollout_ref.actor.fsdp_config.fsdp_size, num_trainer_devices(run.config)
    require(
        size == -1 or size >= ranks or ranks % size == 0,
        f"actor_rollout_ref.actor.fsdp_config.fsdp_size must divide the trainer's ranks ({ranks})",
        size,
        "-1 shards over all ranks",
    )
    sharing = run.config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    require(
        ranks % sharing == 0,
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size must divide the trainer's ranks "
        f"({ranks}): that many ranks share a row",
        sharing,
        "change it, or trainer.nnodes x trainer.n_gpus_per_node",
    )


def check_optimizer(run: StartConfig) -> None:
    """Require an optimizer that can be made, and a schedule that reads its settings."""
    key, optim = "actor_rollout_ref.actor.optim", run.config.actor_rollout_ref.actor.optim
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
    classes = [one for one, value in vars(found).items() if isinstance(value, type)]
    require_one_of(f"{key}.optimizer with {key}.optimizer_impl={module}", name, classes)
    given: Any = OmegaConf.to_container(optim, resolve=True)
    overrides = given["override_optimizer_config"]
    if isinstance(overrides, dict) and overrides:  # to make an optimizer takes seconds of imports
        with refusing(f"{key}.override_optimizer_config must suit {name}", overrides, "repair it"):
            build_optimizer([torch.nn.Parameter(torch.zeros(1))], SimpleNamespace(**given))  # type: ignore[arg-type]


def check_callback(run: StartConfig) -> None:
    """Require that the class that is called after a checkpoint can be imported."""
    key, name = "trainer.checkpoint_callback_class", run.config.trainer.checkpoint_callback_class
    with refusing(f"{key} must be a class that can be imported", name, "give package.module.Class, or null"):
        if name:
            load_class_from_fqn(name, "CheckpointCallback")


def check_batches(run: StartConfig) -> None:
    """Require prompts to divide into mini-batches as verl divides them, and groups as large as what trains of them."""
    num_prompts, group_size = run.config.data.train_batch_size, run.config.actor_rollout_ref.rollout.n
    mini_batch = run.config.actor_rollout_ref.actor.ppo_mini_batch_size
    best_of = run.digen.advantage.best_of
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
    "data.custom_cls": ("verl_digen.trainer.dataset", "DiffusionPromptDataset"),
    "trainer.v1.sampler.custom_sampler": ("verl_digen.trainer.replay_buffer", "GroupReplayBuffer"),
}
"""Section whose `path` and `name` name a class -> module and name of ours, as the recipes have them."""
MANAGER_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
MANAGER = "verl_digen.agent_loop.manager.DiffusionAgentLoopManager"


def check_classes(run: StartConfig) -> None:
    """Require every class to be ours, or a subclass of ours that can be loaded."""
    for section, (module, ours) in CLASSES.items():
        path, name = (
            OmegaConf.select(run.config, f"{section}.{key}", throw_on_missing=True) for key in ("path", "name")
        )
        if (path, name) == (f"pkg://{module}", ours):
            continue
        importlib.import_module("verl.trainer.ppo.v1")  # which imports the modules of ours, and not the other way round
        hint = suggestion(str(name), (ours,)) if path == f"pkg://{module}" else ""
        remedy = f"{hint}leave both keys to the recipes"
        with refusing(f"{section}.name must be a class of {section}.path={path}", name, remedy):
            given = load_extern_object(path, name)
        require(
            _is_subclass(given, f"{module}.{ours}"), f"{section}.name must be {ours} or a subclass of it", name, remedy
        )
    manager = OmegaConf.select(run.config, MANAGER_KEY)
    if manager != MANAGER:
        rule, remedy = f"{MANAGER_KEY} must be {MANAGER}, or a subclass of it", "leave it to the recipes"
        with refusing(f"{rule} that can be imported", manager, remedy):
            given = load_class_from_fqn(manager)
        require(_is_subclass(given, MANAGER), rule, manager, remedy)


def _is_subclass(given: Any, ours: str) -> bool:
    return isinstance(given, type) and issubclass(given, load_class_from_fqn(ours))
