# SPDX-License-Identifier: Apache-2.0
"""The installation, and verl's own keys: those that diffusion leaves alone, and batches that divide."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen import plugin
from verl_digen.config import digen_config
from verl_digen.preflight.pools import num_ranks
from verl_digen.schedulers.require import require

UNUSED_KEYS: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.actor.use_kl_loss": (False, "digen.kl.coef is the weight of the KL term"),
    "algorithm.use_kl_in_reward": (False, "digen.kl.coef is the weight of the KL term"),
    "actor_rollout_ref.actor.use_dynamic_bsz": (
        False,
        "digen.tsp.samples_per_tile and digen.tsp.steps_per_tile are the size of a forward",
    ),
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": (
        False,
        "digen.tsp.reduce says when gradients are reduced",
    ),
    "trainer.use_v1": (True, "the legacy trainer has no hook for diffusion"),
}
"""Keys of verl's that do nothing for diffusion unless they have this value, and what to use in their place."""


def check_plugin(config: DictConfig) -> None:
    """Everything we add to verl is registered in this process."""
    if plugin.FAILURES:
        raise ValueError(
            f"verl-digen is not installed as it should be: {'; '.join(plugin.FAILURES)}; "
            "run `digen doctor`, which says what is missing and how to get it"
        )


def check_digen(config: DictConfig) -> None:
    """The `digen:` section by itself."""
    digen_config(config)


def check_unused(config: DictConfig) -> None:
    """Keys that would do nothing are left alone."""
    for key, (value, remedy) in UNUSED_KEYS.items():
        given = OmegaConf.select(config, key)
        require(given == value, f"{key} must be {str(value).lower()} for diffusion models", given, remedy)


def check_strategy(config: DictConfig) -> None:
    strategy = config.actor_rollout_ref.actor.strategy
    require(
        strategy == "fsdp2",
        "actor_rollout_ref.actor.strategy must be fsdp2 for diffusion models",
        strategy,
        "set it to fsdp2",
    )


def check_batches(config: DictConfig) -> None:
    """Prompts, groups and samples divide as verl divides them."""
    num_prompts, group_size = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_batch, ranks = config.actor_rollout_ref.actor.ppo_mini_batch_size, num_ranks(config)
    require(
        group_size >= 2,
        "actor_rollout_ref.rollout.n must be >= 2, because an advantage compares the samples of one prompt",
        group_size,
        "flow_grpo uses 24",
    )
    require(
        num_prompts * group_size % ranks == 0,
        "data.train_batch_size x actor_rollout_ref.rollout.n must be a multiple of the trainer's ranks "
        f"(trainer.nnodes x trainer.n_gpus_per_node = {ranks})",
        num_prompts * group_size,
        "change one of these four",
    )
    require(
        0 < mini_batch <= num_prompts and num_prompts % mini_batch == 0,
        f"actor_rollout_ref.actor.ppo_mini_batch_size must divide data.train_batch_size={num_prompts}",
        mini_batch,
        "leave it alone for one optimizer step per batch",
    )
