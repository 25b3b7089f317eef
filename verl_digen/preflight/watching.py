# SPDX-License-Identifier: Apache-2.0
"""Rules for rewards that watch, and for the stop on hacking."""

from __future__ import annotations

from collections.abc import Sequence

from omegaconf import DictConfig

from verl_digen.config import HackingConfig, RewardEntry, digen_config
from verl_digen.config.reward import ALWAYS, VALIDATION
from verl_digen.preflight.inputs import validates
from verl_digen.require import require
from verl_digen.reward.named import OWN_MANAGER, has_pool

STOP = "digen.reward.stop_on_hacking"


def check_watching(config: DictConfig) -> None:
    """Require what rewards of some samples, gold rewards and the stop on hacking need."""
    reward = digen_config(config).reward
    _check_manager(config, reward.entries)
    late = [entry for entry in reward.entries if entry.when == VALIDATION]
    for entry in late:
        require(
            bool(validates(config)),
            f"trainer.test_freq must be > 0, or trainer.val_before_train true, with {entry.key}.when={VALIDATION}",
            config.trainer.test_freq,
            f"set trainer.test_freq, or {entry.key}.when={ALWAYS}",
        )
    require(
        bool(reward.golds) or reward.hacking == HackingConfig(),
        "digen.reward.functions must have an entry with gold=true where digen.reward.hacking is set",
        [entry.name for entry in reward.entries],
        "add e.g. NAME: {weight: 0, gold: true}, or leave digen.reward.hacking out",
    )
    if reward.stop_on_hacking:
        _check_stop(config, reward.golds)


def _check_stop(config: DictConfig, golds: Sequence[str]) -> None:
    """Require gold rewards, validations, and a checkpoint of each validated step."""
    trainer = config.trainer
    require(
        bool(golds),
        f"digen.reward.functions must have an entry with gold=true with {STOP}=true",
        [entry.name for entry in digen_config(config).reward.entries],
        f"add e.g. NAME: {{weight: 0, gold: true}}, or {STOP}=false",
    )
    require(
        trainer.test_freq > 0,
        f"trainer.test_freq must be > 0 with {STOP}=true, which compares validations",
        trainer.test_freq,
        f"set e.g. trainer.test_freq=10, or {STOP}=false",
    )
    require(
        trainer.save_freq > 0 and trainer.test_freq % trainer.save_freq == 0,
        f"trainer.save_freq must be > 0 and divide trainer.test_freq={trainer.test_freq} with {STOP}=true, which keeps "
        "the checkpoint of the best validation",
        trainer.save_freq,
        f"set trainer.save_freq={trainer.test_freq}; trainer.max_actor_ckpt_to_keep limits the others",
    )
    contents = list(config.actor_rollout_ref.actor.checkpoint.save_contents)
    require(
        "model" in contents,
        f"actor_rollout_ref.actor.checkpoint.save_contents must have model with {STOP}=true",
        contents,
        "add it",
    )


def _check_manager(config: DictConfig, entries: Sequence[RewardEntry]) -> None:
    """Refuse functions of some samples with a reward manager of the user's own, which is called on all."""
    manager = config.reward.reward_manager.name
    partial = [
        entry.key
        for entry in entries
        if (entry.when != ALWAYS or entry.data_sources is not None) and manager != OWN_MANAGER and not has_pool(entry)
    ]
    require(
        not partial,
        f"{', '.join(partial)} must score all samples with reward.reward_manager.name={manager}, which scores each",
        manager,
        "leave reward.reward_manager alone, or when and data_sources out",
    )
