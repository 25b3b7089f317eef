# SPDX-License-Identifier: Apache-2.0
"""verl's reward loop with pictures: the manager of all reward processes, the worker that holds the functions, the
reward manager that scores one sample with them, and the worker of a reward's own pool."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.plugin.platform import get_platform
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

from verl_digen.config import DigenConfig, RewardConfig, digen_config
from verl_digen.platforms.placement import pool_options, reward_options
from verl_digen.reward.functions import CUSTOM
from verl_digen.reward.layout import reward_layout
from verl_digen.reward.named import find, make, shared_entries
from verl_digen.reward.pool_worker import BatchScorer
from verl_digen.reward.reward_model import ServedModel, connected, router_argument
from verl_digen.reward.sample_rewards import NAMES, ROW
from verl_digen.reward.scoring import Scorer, WeightedReward
from verl_digen.reward.workers import RestartingActor
from verl_digen.types import PartScore, PromptRow, RewardInput


def make_scorer(digen: DigenConfig, custom: Any, router: str | None = None) -> Scorer:
    """The weighted functions of a run that have no pool of their own.

    Args:
        custom: the user's function, or None.
        router: address of the router to verl's reward model, if the run has one.
    """
    rewards = [
        WeightedReward(
            entry.name,
            partial(find(entry), **{**router_argument(find(entry), router), **entry.arguments}),
            entry.weight,
        )
        for entry in shared_entries(digen.reward)
    ]
    if custom is not None:
        function = partial(custom, **router_argument(custom, router))
        rewards.append(WeightedReward(CUSTOM, function, digen.reward.custom_weight))
    return Scorer(tuple(rewards), digen.reward.max_retries, digen.reward.timeout_s)


class DiffusionRewardManager(RewardManagerBase):
    """Scores one sample with the run's reward functions; the constructor's signature is verl's."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        **unused: Any,
    ):
        super().__init__(config, tokenizer, compute_score)
        self._scorer = make_scorer(digen_config(config), compute_score, reward_router_address)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the one sample of `data`: `responses` is uint8 pixels [1, (F,) H, W, 3], `row` its `PromptRow`,
        `reward_names` the functions to call.

        Returns:
            verl's mapping with `reward_score` (float) and `reward_extra_info` (value and details of each function
            that was called), and `calls`, a `RewardCall` per function.
        """
        row: PromptRow = data.non_tensor_batch[ROW][0]
        assert data.batch is not None
        score = await self._scorer.score(
            names=data.non_tensor_batch[NAMES][0],
            data_source=row.data_source,
            solution_image=data.batch["responses"][0].numpy(),
            ground_truth=row.ground_truth,
            extra_info={**row.extra, "prompt": row.text, "images": list(row.images)},
        )
        return {
            "reward_score": score.total,
            "reward_extra_info": dict(score.parts),
            "calls": score.calls,
        }


class DiffusionRewardLoopWorker(RewardLoopWorker):
    """verl's worker without the text tokenizers."""

    def _init_reward_fn(self) -> None:
        router = self.reward_router_address
        further: dict[str, Any] = {} if router is None else {"reward_router_address": router}
        manager_cls = resolve_reward_manager_cls(self.config)
        self.reward_manager = manager_cls(self.config, None, get_custom_reward_fn(self.config), **further)  # type: ignore[arg-type]

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """Score one sample."""
        return await self.reward_manager.run_single(data)


class RewardPoolWorker:
    """Process of one reward's own pool.

    Args:
        served: verl's reward model, if the run has one.
    """

    def __init__(self, config: RewardConfig, name: str, served: ServedModel | None = None):
        entry = connected(next(entry for entry in config.entries if entry.name == name), served)
        pool = entry.pool_settings
        device = get_platform().device_name if pool.num_gpus else "cpu"
        self._scorer = BatchScorer(
            name,
            make(entry, torch.device(device)),
            max_retries=config.max_retries,
            timeout_s=config.timeout_s,
            max_batch_size=pool.max_batch_size,
            batch_wait_s=pool.batch_wait_s,
        )

    async def compute_score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group."""
        return await self._scorer.score(samples)


class DiffusionRewardLoopManager(RewardLoopManager):
    """verl's manager with `DiffusionRewardLoopWorker`s and `RewardPoolWorker`s, which restart after a crash.

    With `reward.reward_model.enable=true` it starts that model's servers first, and waits for them.
    """

    def _init_reward_loop_workers(self) -> None:
        manager = self.reward_model_manager
        served = None if manager is None else ServedModel.of_manager(manager)
        digen = digen_config(self.config)
        layout = reward_layout(self.config, digen)
        self.reward_loop_workers: list[Any] = []
        if layout.num_function_workers:
            self.reward_loop_workers_class = RestartingActor(
                DiffusionRewardLoopWorker, digen.reward.max_retries, **reward_options(self.config, digen)
            )
            super()._init_reward_loop_workers()
        self._pool_actors = [  # kept: a restart needs the constructor's arguments
            RestartingActor(RewardPoolWorker, digen.reward.max_retries, **pool_options(entry.pool_settings, digen))
            for entry in layout.pools
        ]
        self._pool_workers = [
            actor.options(name=f"reward_{entry.name}_{number}").remote(digen.reward, entry.name, served)
            for actor, entry in zip(self._pool_actors, layout.pools, strict=True)
            for number in range(entry.pool_settings.num_workers)
        ]

    @property
    def reward_loop_worker_handles(self) -> list[Any]:
        """Handles of all workers, in the order of `RewardLayout`."""
        return [*self.reward_loop_workers, *self._pool_workers]
