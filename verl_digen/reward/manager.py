# SPDX-License-Identifier: Apache-2.0
"""verl's reward loop with pictures: the manager of all reward processes, the worker that holds the functions, the
reward manager that scores one sample with them, and the workers of a reward's own pool, and of a timeshared reward."""

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

from verl_digen.config import DigenConfig, RewardConfig, RewardEntry, digen_config
from verl_digen.platforms.placement import pool_options, reward_options, timeshared_options
from verl_digen.reward.base import Reward
from verl_digen.reward.functions import CUSTOM, call_arguments
from verl_digen.reward.layout import reward_layout
from verl_digen.reward.named import find, make, shared_entries
from verl_digen.reward.pool_worker import BatchScorer
from verl_digen.reward.reward_model import ServedModel, connected, router_argument
from verl_digen.reward.sample_rewards import AUDIO, NAMES, ROW
from verl_digen.reward.scoring import Scorer, WeightedReward
from verl_digen.reward.timeshared import TimesharedScorer, Turn
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
        `reward_names` the functions to call, `audio` its sound or None.

        Returns:
            verl's mapping with `reward_score` (float) and `reward_extra_info` (value and details of each function
            that was called), and `calls`, a `RewardCall` per function.
        """
        row: PromptRow = data.non_tensor_batch[ROW][0]
        assert data.batch is not None
        pixels, audio = data.batch["responses"][0].numpy(), data.non_tensor_batch[AUDIO][0]
        arguments = call_arguments(RewardInput(pixels, row, sample_index=0, audio=audio))
        score = await self._scorer.score(names=data.non_tensor_batch[NAMES][0], **arguments)
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
        config: verl's.
        served: verl's reward model, if the run has one.
    """

    def __init__(self, config: DictConfig, name: str, served: ServedModel | None = None):
        reward = digen_config(config).reward
        entry = connected(_entry(reward, name), served)
        device = get_platform().device_name if entry.pool_settings.num_gpus else "cpu"
        self._scorer = _batch_scorer(reward, entry, make(entry, torch.device(device)))

    async def compute_score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group."""
        return await self._scorer.score(samples)


class TimesharedRewardWorker:
    """Process of one reward on a device of the trainer; see `verl_digen.reward.timeshared`."""

    def __init__(self, config: DictConfig, name: str):
        reward = digen_config(config).reward
        entry = _entry(reward, name)
        self._scorer = TimesharedScorer(
            lambda: make(entry, torch.device(get_platform().device_name)), partial(_batch_scorer, reward, entry)
        )

    async def compute_score(self, samples: Sequence[RewardInput]) -> list[PartScore]:
        """Score one sample, or all samples of a group, once the reward is awake."""
        return await self._scorer.score(samples)

    async def wake(self) -> Turn | None:
        """Bring the weights to the device, and score what waits."""
        return await self._scorer.wake()

    async def sleep(self) -> Turn | None:
        """Free the device memory once the running call has ended; samples wait until `wake`."""
        return await self._scorer.sleep()


def _entry(config: RewardConfig, name: str) -> RewardEntry:
    return next(entry for entry in config.entries if entry.name == name)


def _batch_scorer(config: RewardConfig, entry: RewardEntry, reward: Reward) -> BatchScorer:
    pool = entry.pool_settings
    return BatchScorer(
        entry.name,
        reward,
        max_retries=config.max_retries,
        timeout_s=config.timeout_s,
        max_batch_size=pool.max_batch_size,
        batch_wait_s=pool.batch_wait_s,
    )


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
        self._pool_actors: list[RestartingActor] = []
        """Kept: a restart needs the constructor's arguments."""
        self._pool_workers: dict[str, list[Any]] = {}
        for entry in layout.pools:
            if not entry.is_timeshared:
                actor = RestartingActor(
                    RewardPoolWorker, digen.reward.max_retries, **pool_options(entry.pool_settings, digen)
                )
                self._start(actor, entry.name, entry.pool_settings.num_workers, served)
        self._order = [entry.name for entry in layout.pools]

    def start_timeshared(self, pool: Any) -> dict[str, list[Any]]:
        """Start the rewards that take turns with the replicas: for each, an asleep process on every device of `pool`
        -> reward -> its workers. Does not wait.

        Args:
            pool: the trainer's devices, reserved.
        """
        digen = digen_config(self.config)
        names = [entry.name for entry in digen.reward.timeshared]
        for options in timeshared_options(pool):
            actor = RestartingActor(TimesharedRewardWorker, digen.reward.max_retries, **options)
            for name in names:
                self._start(actor, name, 1)
        return {name: self._pool_workers[name] for name in names}

    def _start(self, actor: RestartingActor, name: str, num_workers: int, *arguments: Any) -> None:
        """Start further workers of a reward's pool."""
        self._pool_actors.append(actor)
        workers = self._pool_workers.setdefault(name, [])
        for number in range(len(workers), len(workers) + num_workers):
            workers.append(actor.options(name=f"reward_{name}_{number}").remote(self.config, name, *arguments))

    @property
    def reward_loop_worker_handles(self) -> list[Any]:
        """Handles of all workers, in the order of `RewardLayout`."""
        return [*self.reward_loop_workers, *(worker for name in self._order for worker in self._pool_workers[name])]
