# SPDX-License-Identifier: Apache-2.0
"""verl's reward loop with pictures: manager of workers, worker, and the reward manager that scores one sample."""

from __future__ import annotations

import time
from typing import Any

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

from verl_digen.config import DigenConfig, digen_config
from verl_digen.platforms.placement import reward_options
from verl_digen.reward.functions import CUSTOM, resolve
from verl_digen.reward.scoring import Scorer, WeightedReward
from verl_digen.reward.workers import RestartingActor
from verl_digen.types import PromptRow


def make_scorer(digen: DigenConfig, custom: Any) -> Scorer:
    """The weighted reward functions of a run; `custom` is the user's function or None."""
    rewards = [WeightedReward(name, resolve(name), weight) for name, weight in digen.reward.functions.items()]
    if custom is not None:
        rewards.append(WeightedReward(CUSTOM, custom, digen.reward.custom_weight))
    return Scorer(tuple(rewards), digen.reward.max_retries, digen.reward.timeout_s)


class DiffusionRewardManager(RewardManagerBase):
    """Scores one sample with the run's reward functions; the constructor's signature is verl's."""

    def __init__(self, config: DictConfig, tokenizer: Any = None, compute_score: Any = None, **unused: Any):
        super().__init__(config, tokenizer, compute_score)
        self._scorer = make_scorer(digen_config(config), compute_score)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the one sample of `data`: `responses` is uint8 pixels [1, (F,) H, W, 3], `row` its `PromptRow`.

        Returns:
            verl's mapping with `reward_score` (float) and `reward_extra_info` (each function's value, its details),
            and `interval_s`, the (start, end) of scoring in unix time.
        """
        row: PromptRow = data.non_tensor_batch["row"][0]
        assert data.batch is not None
        started_s = time.time()
        score = await self._scorer.score(
            data_source=row.data_source,
            solution_image=data.batch["responses"][0].numpy(),
            ground_truth=row.ground_truth,
            extra_info={**row.extra, "prompt": row.text},
        )
        return {
            "reward_score": score.total,
            "reward_extra_info": dict(score.parts),
            "interval_s": (started_s, time.time()),
        }


class DiffusionRewardLoopWorker(RewardLoopWorker):
    """verl's worker without the text tokenizers."""

    def _init_reward_fn(self) -> None:
        manager_cls = resolve_reward_manager_cls(self.config)
        self.reward_manager = manager_cls(self.config, None, get_custom_reward_fn(self.config))  # type: ignore[arg-type]

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """Score one sample."""
        return await self.reward_manager.run_single(data)


class DiffusionRewardLoopManager(RewardLoopManager):
    """verl's manager with `DiffusionRewardLoopWorker`s, which restart after a crash."""

    def _init_reward_loop_workers(self) -> None:
        digen = digen_config(self.config)
        self.reward_loop_workers_class = RestartingActor(
            DiffusionRewardLoopWorker, digen.reward.max_retries, **reward_options(self.config, digen)
        )
        super()._init_reward_loop_workers()
