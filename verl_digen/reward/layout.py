# SPDX-License-Identifier: Apache-2.0
"""Processes that score: those that share the functions, then each pool's, in one list, which verl passes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from verl_digen.config import DigenConfig, RewardEntry
from verl_digen.pool_sizes import num_trainer_devices
from verl_digen.reward.named import pool_entries, shared_entries

OWN_MANAGER = "DiffusionRewardManager"
"""`reward.reward_manager.name` of this project."""


@dataclass(frozen=True)
class RewardLayout:
    """The processes of a run's rewards.

    Example:
        layout = RewardLayout(2, (ocr,), {"jpeg": 1.0, "ocr": 0.5})  # ocr has one worker
        layout.split([a, b, c])  # ([a, b], [[c]])
    """

    num_function_workers: int
    """Processes that hold all functions without a pool; 0 if there is no such function."""
    pools: tuple[RewardEntry, ...]
    """Rewards with processes of their own; one that is timeshared has a worker per device of the trainer."""
    weights: Mapping[str, float]
    """Weights of all rewards by name."""

    @property
    def num_workers(self) -> int:
        """All processes."""
        return self.num_function_workers + sum(entry.pool_settings.num_workers for entry in self.pools)

    @property
    def num_pool_workers(self) -> int:
        """Processes of pools that are not timeshared."""
        return sum(entry.pool_settings.num_workers for entry in self.pools if not entry.is_timeshared)

    def split(self, handles: Sequence[Any]) -> tuple[Sequence[Any], list[Sequence[Any]]]:
        """The function workers, and each pool's.

        Raises:
            RuntimeError: the number of handles is another one.
        """
        if len(handles) != self.num_workers:
            raise RuntimeError(f"the run's rewards have {self.num_workers} workers, got {len(handles)}")
        pools, start = [], self.num_function_workers
        for size in (entry.pool_settings.num_workers for entry in self.pools):
            pools.append(handles[start : start + size])
            start += size
        return handles[: self.num_function_workers], pools


def has_custom(config: DictConfig) -> bool:
    """True if there is a reward function of the user's own."""
    return config.reward.custom_reward_function.path is not None


def reward_layout(config: DictConfig, digen: DigenConfig) -> RewardLayout:
    """The layout of a run."""
    has_functions = has_custom(config) or bool(shared_entries(digen.reward))
    is_shared = has_functions or config.reward.reward_manager.name != OWN_MANAGER
    return RewardLayout(
        config.reward.num_workers if is_shared else 0,
        tuple(_placed(entry, config) for entry in pool_entries(digen.reward)),
        digen.reward.weights(has_custom=has_custom(config)),
    )


def _placed(entry: RewardEntry, config: DictConfig) -> RewardEntry:
    """The entry with its number of workers, which the trainer's devices decide where it is timeshared."""
    if not entry.is_timeshared:
        return entry
    return replace(entry, pool=replace(entry.pool_settings, num_workers=num_trainer_devices(config)))
