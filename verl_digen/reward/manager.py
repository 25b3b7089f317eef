# SPDX-License-Identifier: Apache-2.0
"""verl's reward loop with pictures: manager, workers, the reward manager, and the worker of a reward's own pool."""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
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

from verl_digen.config import DigenConfig, digen_config
from verl_digen.config.placement import pool_options, reward_options, timeshared_options
from verl_digen.data.rows import ROW, dataproto_rows, is_validation, object_column, sample_indices
from verl_digen.errors import exits_as_errors
from verl_digen.processes.bundles import outcomes
from verl_digen.processes.workers import RestartingActor
from verl_digen.reward.base import Result, Reward
from verl_digen.reward.functions import CUSTOM, reward_of
from verl_digen.reward.named import (
    has_own_manager,
    num_function_workers,
    pool_entries,
    reads_latents,
    scorer_of,
    shared_entries,
)
from verl_digen.reward.reward_model import ServedModel, connected, router_argument
from verl_digen.reward.sample_rewards import MANAGER, SHARED, SampleRewards, weighted
from verl_digen.reward.scoring import BatchScorer, DeviceMove
from verl_digen.types import PartScore, RewardInput, Score

CPU = torch.device("cpu")
AUDIO = "audio"
"""Column with the `Audio` of a sample, or None."""


def samples_of(data: DataProto) -> list[RewardInput]:
    """A sample per row of `data`, see `DiffusionRewardLoopManager.compute_rm_score`."""
    assert data.batch is not None
    rows, columns, pixels = dataproto_rows(data), data.non_tensor_batch, data.batch["responses"].numpy()
    validates, sounds = is_validation(data), columns[AUDIO] if AUDIO in columns else [None] * len(rows)
    return [
        RewardInput(pixels[number], row, index, is_validation=validates, audio=sounds[number])
        for number, (row, index) in enumerate(zip(rows, sample_indices(rows, data), strict=True))
    ]


def sample_data(sample: RewardInput) -> DataProto:
    """The sample as `samples_of` reads it, for the user's own reward manager."""
    return DataProto(
        TensorDict({"responses": torch.from_numpy(sample.pixels.copy()).unsqueeze(0)}, batch_size=1),
        {ROW: object_column([sample.row]), AUDIO: object_column([sample.audio])},
        {"validate": sample.is_validation},
    )


async def score_rows(rewards: SampleRewards, data: DataProto) -> list[Score]:
    """Score of each row of `data`, see `compute_rm_score`. ScoringError if a reward kept failing."""
    samples = samples_of(data)
    sizes = Counter(sample.row.uid for sample in samples)
    scored = [rewards.score(sample, version=0, group_size=sizes[sample.row.uid]) for sample in samples]
    return [score for score, _ in await asyncio.gather(*scored)]


class ManagerReward(Reward):
    """The user's own reward manager as a reward; what else it returns are details."""

    def __init__(self, manager: Any):
        super().__init__(None, CPU)
        self._manager = manager

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Score the samples, each by a call of its own."""

        async def call(sample: RewardInput) -> dict[str, Any]:
            with exits_as_errors():  # each is a task
                return await self._manager.run_single(sample_data(sample))

        found = await asyncio.gather(*map(call, batch))
        return [{**one.get("reward_extra_info", {}), "score": one["reward_score"]} for one in found]


class RewardProcess:
    """Rewards of one process, as `SampleRewards` asks them."""

    scorers: dict[str, BatchScorer]
    """By the rewards' names."""

    async def score(self, calls: Sequence[tuple[Sequence[str], Sequence[RewardInput]]]) -> list[Any]:
        """Score, per call, one sample or all samples of a group with the rewards that are named -> `outcomes`: scores
        by reward, or a ScoringError if one kept failing."""
        return await outcomes([self.score_one(*call) for call in calls])

    async def score_one(self, names: Sequence[str], samples: Sequence[RewardInput]) -> dict[str, list[PartScore]]:
        """One call of `score`."""
        found = await asyncio.gather(*(self.scorers[name].score(samples) for name in names))
        return dict(zip(names, found, strict=True))


class DiffusionRewardManager(RewardProcess, RewardManagerBase):
    """Scores samples with the run's reward functions that have no pool of their own.

    `compute_score` is the user's function beside `digen.reward.functions`, `reward_router_address` that of the router
    to verl's reward model, if the run has them. verl's creation gives the tokenizers; a picture's reward reads no
    tokens. ValueError for arguments by position in the order of verl's text managers.
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
        router, reward = reward_router_address, digen_config(config).reward
        served = None if router is None else ServedModel((), router)
        self._entries = shared_entries(reward)
        self._weights = reward.weights(has_custom=compute_score is not None)
        self.scorers = {entry.name: scorer_of(connected(entry, served), CPU, *reward.limits) for entry in self._entries}
        if compute_score is not None:
            own = partial(reward_of(compute_score), router_argument(compute_score, router), CPU)
            self.scorers[CUSTOM] = BatchScorer(CUSTOM, own, *reward.limits)

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score the one sample of `data` -> verl's mapping with `reward_score` (float) and `reward_extra_info` (value
        and details of each function).

        `responses` is uint8 pixels [1, (F,) H, W, 3]; the prompt's columns are `loop_row`'s; `audio`, its sound, may be
        missing. The functions are those that score such a sample in a run, a training one unless `meta_info` has
        `validate`.
        """
        (sample,) = samples_of(data)
        source, validates = sample.row.data_source, sample.is_validation
        skipped = {entry.name for entry in self._entries if not entry.scores(source, is_validation=validates)}
        found = await self.score_one([name for name in self.scorers if name not in skipped], [sample])
        total, parts = weighted({name: score for name, (score,) in found.items()}, self._weights)
        return {"reward_score": total, "reward_extra_info": parts}


class DiffusionRewardLoopWorker(RewardProcess, RewardLoopWorker):
    """Process that holds the functions: verl's worker without the text tokenizers."""

    def _init_reward_fn(self) -> None:
        router = self.reward_router_address
        further: dict[str, Any] = {} if router is None else {"reward_router_address": router}
        manager_cls: Any = resolve_reward_manager_cls(self.config)
        self.reward_manager = manager_cls(
            config=self.config, tokenizer=None, compute_score=get_custom_reward_fn(self.config), **further
        )
        if has_own_manager(self.config):
            self.scorers = self.reward_manager.scorers
        else:
            make, reward = partial(ManagerReward, self.reward_manager), digen_config(self.config).reward
            self.scorers = {MANAGER: BatchScorer(MANAGER, make, *reward.limits)}

    async def compute_score(self, data: DataProto) -> dict[str, Any]:
        """Score one sample, as verl calls it."""
        return await self.reward_manager.run_single(data)


class RewardPoolWorker(RewardProcess):
    """Process of one reward's own pool. `config`: verl's. `served`: verl's reward model, if the run has one."""

    def __init__(self, config: DictConfig, name: str, served: ServedModel | None = None):
        reward = digen_config(config).reward
        entry = connected(next(entry for entry in reward.entries if entry.name == name), served)
        has_device = entry.pool_settings.num_gpus or entry.is_timeshared
        self._scorer = scorer_of(entry, torch.device(get_platform().device_name) if has_device else CPU, *reward.limits)
        self.scorers = {name: self._scorer}

    async def wake(self) -> DeviceMove | None:
        """Bring the weights to the device, and score what waits."""
        return await self._scorer.wake()

    async def sleep(self) -> DeviceMove | None:
        """Free the device memory once the running call has ended; samples wait until `wake`."""
        return await self._scorer.sleep()


class DiffusionRewardLoopManager(RewardLoopManager):
    """verl's manager with `DiffusionRewardLoopWorker`s and `RewardPoolWorker`s, which restart after a crash. With
    `reward.reward_model.enable=true` it starts that model's servers first, and waits for them."""

    @cached_property
    def _digen(self) -> DigenConfig:
        return digen_config(self.config)

    def _init_reward_loop_workers(self) -> None:
        served, manager = None, self.reward_model_manager
        if manager is not None:
            served = ServedModel(tuple(manager.server_addresses), manager.get_router_address())
        digen = self._digen
        self.reward_loop_workers: list[Any] = []
        self._pools: dict[str, list[Any]] = {}
        """Reward -> the workers of its own pool."""
        if num_function_workers(self.config, digen.reward):
            self.reward_loop_workers_class = RestartingActor(
                DiffusionRewardLoopWorker, digen.reward.max_retries, **reward_options(self.config, digen)
            )
            super()._init_reward_loop_workers()
        for entry in pool_entries(digen.reward):
            if not entry.is_timeshared:
                options = [pool_options(entry.pool_settings, digen)] * entry.pool_settings.num_workers
                self._start(entry.name, options, served)

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Score finished samples as the run does, by functions, pools and combination. Blocks; not in an event loop.

        `data` is as `sampling.outputs.to_dataproto` makes it, or has verl's columns (`data.rows.loop_row`) and
        `responses`, uint8 [N, (F,) H, W, 3]. A reward of groups compares the rows of one uid. ValueError if a reward
        reads latents, which are not in `data`, or takes turns with the replicas.

        Returns `rm_scores` [N, 1] fp32, and the value of each reward as a column [N], nan where it does not score the
        row; `meta_info` lists those columns as `reward_extra_keys`.
        """
        digen = self._digen
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
        """Start the rewards that take turns with the replicas: for each, an asleep process on every device of `pool` ->
        reward -> its workers. Does not wait. `pool`: the trainer's devices, reserved."""
        names = [entry.name for entry in self._digen.reward.timeshared]
        for name in names:
            self._start(name, timeshared_options(pool))
        return {name: self._pools[name] for name in names}

    def _start(self, name: str, options: Sequence[Mapping[str, Any]], *arguments: Any) -> None:
        """Start a reward's own pool, a worker per options."""
        worker = RestartingActor(RewardPoolWorker, self._digen.reward.max_retries)
        self._pools[name] = [
            worker.options(name=f"reward_{name}_{number}", **own).remote(self.config, name, *arguments)
            for number, own in enumerate(options)
        ]

    @property
    def reward_loop_worker_handles(self) -> dict[str, list[Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Pool -> handles of its workers, for `SampleRewards`; verl passes them on."""
        shared = {SHARED: self.reward_loop_workers} if self.reward_loop_workers else {}
        return {**shared, **self._pools}
