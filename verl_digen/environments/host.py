# SPDX-License-Identifier: Apache-2.0
"""Process that holds the environments of many episodes and runs their calls concurrently; and its Ray actors.

| event | consequence |
| --- | --- |
| `begin` | an environment is made and reset, under an id that is used once |
| `step` of an unknown id | `UnknownEpisode`: this process was started again since |
| a call raises, takes `digen.environment.step_timeout_s`, or returns something malformed | the caller gets the error |
| more than `digen.environment.concurrent` calls | they wait; the timeout begins after the wait |

A synchronous `reset` runs in a thread, a `step` in the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from verl.plugin.platform import get_platform

from verl_digen.config import DigenConfig, EnvironmentConfig, PoolSettings, digen_config
from verl_digen.config.placement import pool_options
from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import RestartingActor, WorkerPool
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class UnknownEpisode(RuntimeError):
    """The process does not know the episode."""


class EpisodeHost:
    """See the module.

    Args:
        device: device of what episodes share.
    """

    def __init__(self, config: EnvironmentConfig, device: torch.device):
        self._class = environment_class(config)
        self._settings = environment_settings(config, self._class)
        self._shared = self._class.make_shared(self._settings, device)
        self._timeout_s = config.step_timeout_s
        self._free = asyncio.Semaphore(config.concurrent)
        self._episodes: dict[str, Environment] = {}

    async def begin(self, episode: str, row: PromptRow, seed: int) -> Instruction:
        """Make the environment of an episode, and reset it."""

        async def reset() -> Instruction:
            environment = self._episodes[episode] = self._class(self._settings, self._shared)
            found: Any = await asyncio.to_thread(environment.reset, row, seed)
            return self._checked(await found if inspect.isawaitable(found) else found)

        return await self._run(reset)

    async def step(self, episode: str, picture: Picture) -> TurnResult:
        """Give the environment the picture of its turn.

        Raises:
            UnknownEpisode: this process was started again since. What the environment raises.
        """
        if episode not in self._episodes:
            raise UnknownEpisode(f"the process does not know episode {episode}; it was started again")
        environment = self._episodes[episode]
        return self._checked_result(await self._run(lambda: environment.step(picture)))

    async def end(self, episode: str) -> None:
        """Close the environment and forget the episode; no effect for an unknown one."""
        environment = self._episodes.pop(episode, None)
        if environment is not None:
            try:
                environment.close()
            except Exception:  # the episode is over, and its answers are known
                logger.warning("closing the environment of episode %s failed", episode, exc_info=True)

    async def _run(self, call: Callable[[], Awaitable[Answer]]) -> Answer:
        async with self._free:
            try:
                return await asyncio.wait_for(call(), self._timeout_s)
            except asyncio.TimeoutError as error:
                raise RuntimeError(
                    f"{self._class.__name__} took longer than digen.environment.step_timeout_s={self._timeout_s:g} s"
                ) from error

    def _checked(self, instruction: Any) -> Instruction:
        if not isinstance(instruction, Instruction) or not isinstance(instruction.text, str):
            raise TypeError(f"{self._class.__name__} must ask with an Instruction of a text, got {instruction!r:.200}")
        return instruction

    def _checked_result(self, result: Any) -> TurnResult:
        if not isinstance(result, TurnResult) or not math.isfinite(result.reward):
            raise TypeError(
                f"{self._class.__name__}.step must return a TurnResult with a finite reward, got {result!r:.200}"
            )
        if not result.done:
            self._checked(result.instruction)
        return result


class EnvironmentWorker(EpisodeHost):
    """Process of environments.

    Args:
        config: verl's.
    """

    def __init__(self, config: DictConfig):
        environment = digen_config(config).environment
        super().__init__(environment, torch.device(get_platform().device_name if environment.num_gpus else "cpu"))


def environment_pool(handles: Sequence[Any], deadlines: DeadlinesConfig) -> WorkerPool:
    """Client of the environment workers of a run."""
    return WorkerPool(handles, deadlines, kind="environment", key="digen.environment.num_workers")


def start_environments(config: DictConfig, digen: DigenConfig) -> list[Any]:
    """Start the environment workers of a run -> their handles.

    Args:
        config: verl's, with an environment. digen: its `digen:` section.
    """
    # Ray's own retry reaches the restarted process, which answers `UnknownEpisode`
    options = pool_options(PoolSettings(num_gpus=digen.environment.num_gpus), digen)
    worker = RestartingActor(EnvironmentWorker, 1, **options)
    return [
        worker.options(name=f"environment_{number}").remote(config) for number in range(digen.environment.num_workers)
    ]
