# SPDX-License-Identifier: Apache-2.0
"""verl's reward loop with pictures: the manager of all reward processes, the worker that holds the functions, the
reward manager that scores one sample with them, and the workers of a reward's own pool, and of a timeshared reward."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl import DataProto
from verl.experimental.reward_loop.reward_loop import RewardLoopManager, RewardLoopWorker
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase
from verl.plugin.platform import get_platform
from verl.trainer.ppo.reward import get_custom_reward_fn, resolve_reward_manager_cls

from verl_digen.config import DigenConfig, RewardConfig, RewardEntry, digen_config
from verl_digen.data.rows import dataproto_rows, is_validation, sample_indices
from verl_digen.platforms.placement import pool_options, reward_options, timeshared_options
from verl_digen.reward.base import Reward
from verl_digen.reward.functions import CUSTOM, call_arguments
from verl_digen.reward.layout import reward_layout
from verl_digen.reward.named import find, make, reads_latents, shared_entries
from verl_digen.reward.pool_worker import BatchScorer
from verl_digen.reward.reward_model import ServedModel, connected, router_argument
from verl_digen.reward.sample_rewards import AUDIO, NAMES, SampleRewards
from verl_digen.reward.scoring import Scorer, WeightedReward
from verl_digen.reward.timeshared import TimesharedScorer, Turn
from verl_digen.reward.workers import RestartingActor
from verl_digen.types import PartScore, PromptRow, RewardInput, Score


async def score_rows(rewards: SampleRewards, data: DataProto) -> list[Score]:
    """Score of each row of `data`, see `DiffusionRewardLoopManager.compute_rm_score`.

    Raises:
        ScoringError: a reward kept failing.
    """
    assert data.batch is not None
    rows, columns, pixels = dataproto_rows(data), data.non_tensor_batch, data.batch["responses"].numpy()
    sizes, validates = Counter(row.uid for row in rows), is_validation(data)
    sounds = columns[AUDIO] if AUDIO in columns else [None] * len(rows)
    samples = [
        RewardInput(pixels[number], row, index, is_validation=validates, audio=sounds[number])
        for number, (row, index) in enumerate(zip(rows, sample_indices(rows, data), strict=True))
    ]
    scored = [rewards.score(sample, version=0, group_size=sizes[sample.row.uid]) for sample in samples]
    return [score for score, _ in await asyncio.gather(*scored)]


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
    """Scores one sample with the run's reward functions that have no pool of their own.

    Args:
        compute_score: the user's function beside those of `digen.reward.functions`, or None.
        reward_router_address: address of the router to verl's reward model, if the run has one.
        tokenizer, reward_model_tokenizer: verl's creation gives them; a picture's reward reads no tokens.

    Raises:
        ValueError: arguments by position in the order of verl's text managers.
    """

    def __init__(
        self,
        config: DictConfig,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        *,
        tokenizer: Any = None,
        reward_model_tokenizer: Any = None,
    ):
        if callable(reward_router_address):
            raise ValueError(
                "DiffusionRewardManager takes (config, compute_score, reward_router_address) by position, got a "
                "function as the address; give tokenizer= and compute_score= by keyword"
            )
        super().__init__(config, tokenizer, compute_score)
        digen = digen_config(config)
        self._scorer = make_scorer(digen, compute_score, reward_router_address)
        self._shared = shared_entries(digen.reward)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the one sample of `data`.

        Args:
            data: `responses` is uint8 pixels [1, (F,) H, W, 3]; the prompt's columns are those of `loop_row`. Optional:
                `audio`, its sound, and `reward_names`, the functions to call; without it those that score such a
                sample in a run, a training one unless `meta_info` has `validate`.

        Returns:
            verl's mapping with `reward_score` (float) and `reward_extra_info` (value and details of each function
            that was called), and `calls`, a `RewardCall` per function.
        """
        assert data.batch is not None
        (row,), columns = dataproto_rows(data), data.non_tensor_batch
        audio = columns[AUDIO][0] if AUDIO in columns else None
        arguments = call_arguments(RewardInput(data.batch["responses"][0].numpy(), row, sample_index=0, audio=audio))
        names = columns[NAMES][0] if NAMES in columns else self._names(row, is_validation=is_validation(data))
        score = await self._scorer.score(names=names, **arguments)
        return {
            "reward_score": score.total,
            "reward_extra_info": dict(score.parts),
            "calls": score.calls,
        }

    def _names(self, row: PromptRow, *, is_validation: bool) -> tuple[str, ...]:
        """The functions that score a sample of this prompt."""
        entries = (entry for entry in self._shared if entry.scores(row.data_source, is_validation=is_validation))
        return (CUSTOM, *(entry.name for entry in entries))


class DiffusionRewardLoopWorker(RewardLoopWorker):
    """verl's worker without the text tokenizers."""

    def _init_reward_fn(self) -> None:
        router = self.reward_router_address
        further: dict[str, Any] = {} if router is None else {"reward_router_address": router}
        manager_cls: Any = resolve_reward_manager_cls(self.config)
        self.reward_manager = manager_cls(
            config=self.config, tokenizer=None, compute_score=get_custom_reward_fn(self.config), **further
        )

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

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Score finished samples as the run does, by functions, pools and combination. Blocks; not in an event loop.

        Args:
            data: as `sampling.outputs.to_dataproto` makes it, or verl's columns, see `data.rows.loop_row`; with
                `responses`, uint8 [N, (F,) H, W, 3]. A reward of groups compares the rows of one uid.

        Returns:
            `rm_scores` [N, 1] fp32, and the value of each reward as a column [N], nan where it does not score the row;
            `meta_info` lists those columns as `reward_extra_keys`.

        Raises:
            ValueError: a reward reads latents, which are not in `data`, or takes turns with the replicas.
        """
        digen = digen_config(self.config)
        unfit = [entry.name for entry in digen.reward.entries if entry.is_timeshared or reads_latents(entry)]
        if unfit:
            raise ValueError(
                f"compute_rm_score needs rewards of pixels with processes of their own, got {', '.join(unfit)}; these "
                "score while samples are generated"
            )
        rewards = SampleRewards.of_run(self.config, self.reward_loop_worker_handles, digen)
        scores = asyncio.run(score_rows(rewards, data))
        names = sorted({name for score in scores for name in score.parts})
        parts = {name: np.array([score.parts.get(name, np.nan) for score in scores]) for name in names}
        totals = torch.tensor([score.total for score in scores]).unsqueeze(1)
        batch = TensorDict({"rm_scores": totals}, batch_size=len(data))
        return DataProto(batch, parts, {"reward_extra_keys": names})  # pyright: ignore[reportArgumentType]

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
