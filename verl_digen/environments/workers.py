# SPDX-License-Identifier: Apache-2.0
"""Client of the environment workers: a worker that dies costs time, not episodes.

| event | consequence |
| --- | --- |
| a worker's process dies | Ray starts it again; its episodes are made again, as below |
| it gives no sign of life for `digen.deadlines.answer_s` | it is killed, which is the same |
| an environment raises, or takes too long | its episode is made again |
| an episode is made again | on the worker with the fewest episodes: `reset` with the same seed, then `step` with each
  picture that it has |
| its instructions are then other ones | `EpisodeDiverged`: the caller starts it afresh |
| it was made again `digen.environment.max_retries` times | `EpisodeFailed` |
| all workers are dead permanently | `RunStopped` |

Invariants (tests/environments/test_workers.py): a picture is given to the environment of its own episode, at its turn;
an episode whose worker dies goes on at the same turn with the rewards that it has.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from verl_digen.config import EnvironmentConfig
from verl_digen.environments.base import Instruction, Picture, TurnResult
from verl_digen.errors import RunStopped, describe
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import WorkerPool
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)


class EpisodeFailed(RuntimeError):
    """The environment of an episode kept failing."""


class EpisodeDiverged(RuntimeError):
    """An environment that was made again asks for something else than before."""


class EnvironmentWorkers(WorkerPool):
    """See the module.

    Args:
        handles: handles of `EnvironmentWorker`.
    """

    def __init__(self, handles: Sequence[Any], config: EnvironmentConfig, deadlines: DeadlinesConfig):
        super().__init__(handles, deadlines, kind="environment", key="digen.environment.num_workers")
        self.max_retries = config.max_retries
        self._numbers = itertools.count()

    def open(self, name: str, row: PromptRow, seed: int) -> OpenEpisode:
        """An episode that is not begun yet; `name` is unique among the processes that have clients."""
        return OpenEpisode(self, f"{name}#{next(self._numbers)}", row, seed)


class OpenEpisode:
    """One episode, from its client's side.

    Example:
        episode = workers.open("p0_3", row, seed)
        instruction = await episode.reset()
        result = await episode.step(picture)    # on another worker, if the first one died meanwhile
        episode.close()
    """

    def __init__(self, workers: EnvironmentWorkers, name: str, row: PromptRow, seed: int, num_retries: int = 0):
        self._workers, self._name, self._row, self._seed = workers, name, row, seed
        self.num_retries = num_retries
        """Times that its environment was made again, or was to be."""
        self._worker: Any = None
        """The worker that has its environment; None before `reset`, and after a failure."""
        self._last: Any = None
        self._asked: list[Instruction] = []
        """Instructions so far."""
        self._pictures: list[Picture] = []

    async def reset(self) -> Instruction:
        """Begin the episode.

        Raises:
            EpisodeFailed, RunStopped: see the module.
        """
        await self._tried(None)
        return self._asked[0]

    async def step(self, picture: Picture) -> TurnResult:
        """Give the environment the picture of the next turn.

        Raises:
            EpisodeFailed, EpisodeDiverged, RunStopped: see the module.
        """
        result = await self._tried(picture)
        assert result is not None
        self._pictures.append(picture)
        if result.instruction is not None:
            self._asked.append(result.instruction)
        return result

    def afresh(self) -> OpenEpisode:
        """Begin again: a copy that is not begun, whose retries count on."""
        return OpenEpisode(self._workers, f"{self._name}'", self._row, self._seed, self.num_retries)

    def close(self) -> None:
        """Have the worker close the environment, and do not wait for it."""
        if self._worker is not None:
            self._worker.end.remote(self._id)
            self._workers.release(self._worker)
            self._worker = None

    @property
    def _id(self) -> str:
        """Id of its environment, another one for each that is made."""
        return f"{self._name}.{self.num_retries}"

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
                self._give_up_worker(failure)
                if self.num_retries >= self._workers.max_retries:
                    raise EpisodeFailed(
                        f"the environment of episode {self._name} failed {1 + self.num_retries} times at turn "
                        f"{len(self._pictures)}, more than digen.environment.max_retries={self._workers.max_retries} "
                        f"allows; the last error was: {describe(failure)}"
                    ) from failure
                logger.warning("the environment of episode %s is made again: %s", self._name, describe(failure))
                self.num_retries += 1

    def _give_up_worker(self, error: BaseException) -> None:
        if self._worker is not None:
            if not isinstance(error, RayActorError):
                self._worker.end.remote(self._id)
            self._workers.release(self._worker, error)
            self._worker = None

    async def _restore(self) -> None:
        """Make the environment, and bring it to the turn at which the episode is."""
        instruction = await self._call("begin", self._row, self._seed)
        asked = [instruction]
        for picture in self._pictures:
            result: TurnResult = await self._call("step", picture)
            if result.instruction is not None:
                asked.append(result.instruction)
        if not self._asked:
            self._asked = asked
        elif not _are_equal(asked, self._asked):
            raise EpisodeDiverged(
                f"the environment of episode {self._name} was made again, and asks for something else"
            )

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._workers.answer(self._worker, getattr(self._worker, method).remote(self._id, *arguments))


def _are_equal(some: Sequence[Instruction], others: Sequence[Instruction]) -> bool:
    """True if both ask for the same, turn by turn."""
    return len(some) == len(others) and all(map(_is_equal, some, others))


def _is_equal(one: Instruction, other: Instruction) -> bool:
    if one.text != other.text or (one.images is None) != (other.images is None):
        return False
    images, others = one.images or (), other.images or ()
    return len(images) == len(others) and all(
        type(image) is type(its) and np.array_equal(image, its) for image, its in zip(images, others, strict=True)
    )
