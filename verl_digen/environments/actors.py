# SPDX-License-Identifier: Apache-2.0
"""Environment workers: the Ray actors that hold the environments of a run's episodes."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from verl.plugin.platform import get_platform

from verl_digen.config import PoolSettings, digen_config
from verl_digen.environments.host import EpisodeHost
from verl_digen.platforms.placement import pool_options
from verl_digen.reward.workers import RestartingActor


class EnvironmentWorker(EpisodeHost):
    """Process of environments.

    Args:
        config: verl's.
    """

    def __init__(self, config: DictConfig):
        environment = digen_config(config).environment
        super().__init__(environment, torch.device(get_platform().device_name if environment.num_gpus else "cpu"))


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
