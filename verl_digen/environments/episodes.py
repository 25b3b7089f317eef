# SPDX-License-Identifier: Apache-2.0
"""Episodes of environments: the process that holds many of them and runs their calls concurrently (`EpisodeHost`), its
Ray actors, and an episode from its client's side (`OpenEpisode`): a worker that dies costs time, not episodes.

| event at the client | consequence |
| --- | --- |
| a worker's process dies | Ray starts it again; its episodes are made again, as below |
| it gives no sign of life for `digen.deadlines.answer_s` | it is killed, which is the same |
| an environment raises, or takes too long | its episode is made again |
| an episode is made again | on the worker with the fewest episodes: `reset` with the same seed, then its pictures |
| its instructions are then other ones | `EpisodeDiverged`: the caller starts it afresh |
| it was made again `digen.environment.max_retries` times | `EpisodeFailed` |
| all workers are dead permanently | `RunStopped` |

Invariants (tests/environments/test_open_episode.py): a picture is given to the environment of its own episode, at its
turn; an episode whose worker dies goes on at the same turn with the rewards that it has.
"""

import asyncio
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from verl.plugin.platform import get_platform

from verl_digen.config import DigenConfig, EnvironmentConfig, PoolSettings, digen_config
from verl_digen.config.placement import pool_options
from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.errors import RunStopped, call_users, describe, exits_as_errors
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import RestartingActor, WorkerPool
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)


class EpisodeHost:
    """Environments by an id that is used once; `device` is that of what episodes share. The caller gets the error of a
    call that raises, takes `digen.environment.step_timeout_s`, or returns something malformed; the timeout begins after
    the wait for one of the `digen.environment.concurrent` places."""

    def __init__(self, config: EnvironmentConfig, device: torch.device):
        self._class = environment_class(config)
        self._settings = environment_settings(config, self._class)
        self._shared = self._class.make_shared(self._settings, device)
        self._timeout_s = config.step_timeout_s
        self._free = asyncio.Semaphore(config.concurrent)
        self._episodes: dict[str, Environment] = {}

    async def begin(self, episode: str, row: PromptRow, seed: int) -> Instruction:
        """Make the environment of an episode, and reset it."""
        with exits_as_errors():
            environment = self._episodes[episode] = self._class(self._settings, self._shared)
        return self._checked(await self._run(environment.reset, row, seed))

    async def step(self, episode: str, picture: Picture) -> TurnResult:
        """Give the environment the picture of its turn. RuntimeError if this process was started again since."""
        if episode not in self._episodes:
            raise RuntimeError(f"the process does not know episode {episode}; it was started again")
        return self._checked_result(await self._run(self._episodes[episode].step, picture))

    async def end(self, episode: str) -> None:
        """Close the environment and forget the episode; no effect for an unknown one."""
        environment = self._episodes.pop(episode, None)
        if environment is not None:
            try:
                environment.close()
            except Exception:  # the episode is over, and its answers are known
                logger.warning("closing the environment of episode %s failed", episode, exc_info=True)

    async def _run(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method of an environment, in a thread if it is synchronous."""
        async with self._free:
            try:
                return await asyncio.wait_for(call_users(method, *arguments), self._timeout_s)
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
    """Process of environments; `config` is verl's."""

    def __init__(self, config: DictConfig):
        environment = digen_config(config).environment
        super().__init__(environment, torch.device(get_platform().device_name if environment.num_gpus else "cpu"))


def environment_pool(handles: Sequence[Any], deadlines: DeadlinesConfig) -> WorkerPool:
    """Client of the environment workers of a run."""
    return WorkerPool(handles, deadlines, kind="environment", key="digen.environment.num_workers")


def start_environments(config: DictConfig, digen: DigenConfig) -> list[Any]:
    """Start the environment workers of a run that has an environment -> their handles."""
    # Ray's own retry reaches the restarted process, which does not know the episode
    options = pool_options(PoolSettings(num_gpus=digen.environment.num_gpus), digen)
    worker = RestartingActor(EnvironmentWorker, 1, **options)
    return [
        worker.options(name=f"environment_{number}").remote(config) for number in range(digen.environment.num_workers)
    ]


_NUMBERS = itertools.count()
"""Numbers of environments, each of which has an id of its own."""


class EpisodeFailed(RuntimeError):
    """The environment of an episode kept failing."""


class EpisodeDiverged(RuntimeError):
    """An environment that was made again asks for something else than before."""


class OpenEpisode:
    """An episode, not begun yet; see the module. `name` is unique in the run.

    Example:
        episode = OpenEpisode(workers, "p0_3", row, seed, max_retries=3)
        instruction = await episode.reset()
        result = await episode.step(picture)    # on another worker, if the first one died meanwhile
        episode.close()
    """

    def __init__(self, workers: WorkerPool, name: str, row: PromptRow, seed: int, *, max_retries: int):
        self._workers, self._name, self._row, self._seed = workers, name, row, seed
        self._max_retries, self.num_retries = max_retries, 0
        """Times that its environment was made again, or was to be."""
        self._worker: Any = None
        """The worker that has its environment; None before `reset`, and after a failure."""
        self._last: Any = None
        self._id = ""
        """Id of its environment."""
        self._asked: list[Instruction] = []
        """Instructions so far."""
        self._pictures: list[Picture] = []

    async def reset(self) -> Instruction:
        """Begin the episode. Raises EpisodeFailed and RunStopped, see the module."""
        await self._tried(None)
        return self._asked[0]

    async def step(self, picture: Picture) -> TurnResult:
        """Give the environment the picture of the next turn. Raises EpisodeFailed, EpisodeDiverged, RunStopped."""
        result = await self._tried(picture)
        assert result is not None
        self._pictures.append(picture)
        if result.instruction is not None:
            self._asked.append(result.instruction)
        return result

    def forget(self) -> None:
        """Forget the turns, so that the episode can begin again; its retries count on."""
        self._asked, self._pictures = [], []

    def close(self, failure: BaseException | None = None) -> None:
        """Have the worker close the environment, and do not wait for it. `failure`: why the worker is given up."""
        if self._worker is not None:
            if not isinstance(failure, RayActorError):
                self._worker.end.remote(self._id)
            self._workers.release(self._worker, failure)
            self._worker = None

    async def _tried(self, picture: Picture | None) -> TurnResult | None:
        """Give a picture, or none to begin; the environment is made again after an error."""
        while True:
            try:
                if self._worker is None:
                    self._last = self._worker = self._workers.take(self._last)
                    await self._restore()
                return None if picture is None else await self._call("step", picture)
            except (EpisodeDiverged, RunStopped):
                raise
            except Exception as failure:  # of the environment or of Ray
                self.close(failure)
                if self.num_retries >= self._max_retries:
                    raise EpisodeFailed(
                        f"the environment of episode {self._name} failed {1 + self.num_retries} times at turn "
                        f"{len(self._pictures)}, more than digen.environment.max_retries={self._max_retries} "
                        f"allows; the last error was: {describe(failure)}"
                    ) from failure
                logger.warning("the environment of episode %s is made again: %s", self._name, describe(failure))
                self.num_retries += 1

    async def _restore(self) -> None:
        """Make the environment, and bring it to the turn at which the episode is."""
        self._id = f"{self._name}#{next(_NUMBERS)}"
        instruction = await self._call("begin", self._row, self._seed)
        asked = [instruction]
        for picture in self._pictures:
            result: TurnResult = await self._call("step", picture)
            if result.instruction is not None:
                asked.append(result.instruction)
        if not self._asked:
            self._asked = asked
        elif len(asked) != len(self._asked) or not all(map(_is_equal, asked, self._asked)):
            raise EpisodeDiverged(
                f"the environment of episode {self._name} was made again, and asks for something else"
            )

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._workers.answer(self._worker, getattr(self._worker, method).remote(self._id, *arguments))


def _is_equal(one: Instruction, other: Instruction) -> bool:
    if one.text != other.text or (one.images is None) != (other.images is None):
        return False
    images, others = one.images or (), other.images or ()
    return len(images) == len(others) and all(map(np.array_equal, images, others))  # references are texts
