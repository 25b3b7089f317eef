# SPDX-License-Identifier: Apache-2.0
"""Environment workers: the Ray actors that hold the environments of a run's episodes."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from verl.plugin.platform import get_platform

from verl_digen.config import PoolSettings, digen_config
from verl_digen.environments.base import Instruction, Picture, TurnResult
from verl_digen.environments.host import EpisodeHost
from verl_digen.platforms.placement import pool_options
from verl_digen.reward.workers import RestartingActor
from verl_digen.types import PromptRow


class EnvironmentWorker:
    """Process of environments, see `verl_digen.environments.host`.

    Args:
        config: verl's.
    """

    def __init__(self, config: DictConfig):
        environment = digen_config(config).environment
        device = torch.device(get_platform().device_name if environment.num_gpus else "cpu")
        self._host = EpisodeHost(environment, device)

    async def begin(self, episode: str, row: PromptRow, seed: int) -> Instruction:
        """Make and reset the environment of an episode."""
        return await self._host.begin(episode, row, seed)

    async def step(self, episode: str, picture: Picture) -> TurnResult:
        """Give an environment the picture of its turn."""
        return await self._host.step(episode, picture)

    async def end(self, episode: str) -> None:
        """Close the environment of an episode."""
        await self._host.end(episode)


class StartedEnvironments:
    """The environment workers of a run; keep it as long as they may restart.

    Args:
        config: verl's, with an environment.
    """

    def __init__(self, config: DictConfig):
        digen = digen_config(config)
        environment = digen.environment
        # Ray's own retry reaches the restarted process, which answers `UnknownEpisode`
        options = pool_options(PoolSettings(num_gpus=environment.num_gpus), digen)
        self._actor = RestartingActor(EnvironmentWorker, 1, **options)
        self.handles: list[Any] = [
            self._actor.options(name=f"environment_{number}").remote(config)
            for number in range(environment.num_workers)
        ]
