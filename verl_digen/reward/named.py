# SPDX-License-Identifier: Apache-2.0
"""Rewards by name: an entry of `digen.reward.functions` -> its function or class, with its arguments checked."""

import pkgutil
from collections.abc import Iterable
from typing import Any

import torch
from omegaconf import DictConfig

from verl_digen.config import RewardConfig, RewardEntry
from verl_digen.require import check_class, require_one_of
from verl_digen.reward import scorers
from verl_digen.reward.base import Reward, require_installed
from verl_digen.reward.functions import reward_of
from verl_digen.reward.scoring import BatchScorer
from verl_digen.types import PromptRow
from verl_digen.user_modules import load

BUILT_IN = {
    module.name: f"{scorers.__name__}.{module.name}:REWARD" for module in pkgutil.iter_modules(scorers.__path__)
}
"""Name -> "module:REWARD" of each file in `scorers/`; none of them is imported before it is asked for."""

OWN_MANAGER = "DiffusionRewardManager"
"""`reward.reward_manager.name` of this project."""


def find(entry: RewardEntry) -> type[Reward]:
    """The class that an entry stands for; for a function a `FunctionReward`. Its arguments are not checked. ValueError
    for an unknown name (lists the built-in ones), a module or file that cannot be loaded or lacks it, or another class.
    """
    known = f"one of {', '.join(sorted(BUILT_IN))}, or FILE.py:NAME or package.module.NAME"
    found = load(BUILT_IN.get(entry.target, entry.target), entry.key, known)
    if not isinstance(found, type):
        return reward_of(found)
    return check_class(found, Reward, entry.key)


def check(entry: RewardEntry) -> tuple[type[Reward], Any]:
    """The class that an entry stands for, and its settings. ValueError unless it can be made and called with them."""
    found = find(entry)
    require_one_of(f"{entry.key}: scope of {found.__name__}", found.scope, ("sample", "group"))
    return found, found.settings(entry.arguments, entry.key)


def make(entry: RewardEntry, device: torch.device) -> Reward:
    found, settings = check(entry)
    try:
        return found(settings, device)
    except ValueError:  # says what it is about
        raise
    except (Exception, SystemExit) as error:
        told = f"got {entry.target!r} ({type(error).__name__}: {error}); repair it, or what it reads"
        raise ValueError(f"{entry.key} must be a reward that can be made, {told}") from error


def scorer_of(entry: RewardEntry, device: torch.device, max_retries: int, timeout_s: float) -> BatchScorer:
    """Caller of the reward, which is made on `device`: in batches where it has a pool of its own."""
    pool = entry.pool_settings
    return BatchScorer(
        entry.name,
        lambda: make(entry, device),
        max_retries,
        timeout_s,
        max_batch_size=pool.max_batch_size if has_pool(entry) else None,
        batch_wait_s=pool.batch_wait_s,
        is_asleep=entry.is_timeshared,
    )


def check_packages(config: RewardConfig) -> None:
    """Require the packages of every reward on this machine."""
    for entry in config.entries:
        require_installed(find(entry).packages, entry.name)


def check_rows(config: RewardConfig, rows: Iterable[PromptRow], *, is_validation: bool) -> None:
    """Require every prompt to have what the rewards read that score it; the error names the first that has not."""
    entries = [(entry, find(entry)) for entry in config.entries]
    for row in rows:
        for entry, found in entries:
            if entry.scores(row.data_source, is_validation=is_validation):
                try:
                    found.check_row(entry.arguments, row)
                except Exception as error:  # a ValueError's text is for the user, a KeyError's alone says nothing
                    told = error if isinstance(error, ValueError) else repr(error)
                    raise ValueError(f"{row.place or repr(row.text)}: {entry.key}: {told}") from error


def reads_latents(entry: RewardEntry) -> bool:
    """True if the reward needs latents beside pixels."""
    return find(entry).reads_latents(entry.arguments)


def has_pool(entry: RewardEntry) -> bool:
    """True if the entry has processes of its own: a class, or a function that asks for them."""
    return entry.pool is not None or find(entry).has_pool


def pool_entries(config: RewardConfig) -> tuple[RewardEntry, ...]:
    """Entries with processes of their own, in order."""
    return tuple(entry for entry in config.entries if has_pool(entry))


def shared_entries(config: RewardConfig) -> tuple[RewardEntry, ...]:
    """Functions that share the processes of `reward.num_workers`, in order."""
    return tuple(entry for entry in config.entries if not has_pool(entry))


def has_custom(config: DictConfig) -> bool:
    """True if the user has a reward function."""
    return config.reward.custom_reward_function.path is not None


def has_own_manager(config: DictConfig) -> bool:
    """True if this project's reward manager calls the functions, and not the user's."""
    return config.reward.reward_manager.name == OWN_MANAGER


def num_function_workers(config: DictConfig, reward: RewardConfig) -> int:
    """Processes that hold all functions without a pool; 0 if there is no such function."""
    is_needed = has_custom(config) or bool(shared_entries(reward)) or not has_own_manager(config)
    return config.reward.num_workers if is_needed else 0
