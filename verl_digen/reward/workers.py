# SPDX-License-Identifier: Apache-2.0
"""Worker processes that die cost time, not samples: those of rewards, and of environments.

| event | consequence |
| --- | --- |
| a worker's process dies | Ray restarts it, at most `MAX_RESTARTS` times per run, and retries its open calls |
| it gives no sign of life for `digen.deadlines.answer_s` | it is killed, so that it restarts |
| it dies 1 + `digen.reward.max_retries` times on a sample | the sample fails with `ScoringError`, and is counted |
| it is dead permanently | it is removed, and its samples go to the others |
| all are dead permanently | `RunStopped` |

Invariant (tests/reward/test_workers.py): a sample gets its own score or an error, never another number.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from copy import copy
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from verl_digen.actors import is_starting
from verl_digen.errors import RunStopped
from verl_digen.reward.scoring import ScoringError

logger = logging.getLogger(__name__)

MAX_RESTARTS = 20
"""Maximum restarts of one worker per run. A broken worker would otherwise be restarted forever."""

MAX_CALLS = 100_000
"""Maximum concurrent calls of a worker. With Ray's 1000 a sign of life would queue behind the samples of a batch."""


class RestartingActor:
    """Ray actor class of a worker that restarts after a crash; used like Ray's own actor classes.

    Keeps references to the constructor arguments: Ray drops a large argument once an actor has started, and could not
    restart it (2.60). The creator of this object must keep a reference to it.

    Args:
        max_retries: number of times that Ray retries a sample on which the worker died.
        options: further actor options.
    """

    def __init__(self, worker_class: type, max_retries: int, **options: Any):
        self._actor: Any = ray.remote(worker_class)
        self._options = {
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": max_retries,
            "max_concurrency": MAX_CALLS,
            **options,
        }
        self._kept: list[Any] = []

    def options(self, **options: Any) -> RestartingActor:
        """A copy with further actor options."""
        derived = copy(self)
        derived._options = {**self._options, **options}
        return derived

    def remote(self, *args: Any) -> Any:
        """Start a worker -> its handle."""
        references = [ray.put(argument) for argument in args]
        self._kept += references
        return self._actor.options(**self._options).remote(*references)


class WorkerPool:
    """Workers of one kind, started with `RestartingActor`.

    Args:
        answer_s: `digen.deadlines.answer_s`. A worker that takes longer to answer is asked for a sign of life.
        kind: what they are, for messages.
        key: config key of their number.
    """

    def __init__(self, handles: Sequence[Any], answer_s: float, kind: str, key: str):
        self._living = list(handles)
        self._kind, self._key = kind, key
        self._num_open: Counter[Any] = Counter()
        """Worker -> samples or episodes that it has from here."""
        self._answer_s = answer_s
        self._asked: dict[Any, asyncio.Task[None]] = {}
        self._last_error = "none was started"

    def take(self, other_than: Any = None) -> Any:
        """Choose a worker: one of those with the fewest samples, and another one than given where there is one.

        Raises:
            RunStopped: no worker is left.
        """
        if not self._living:
            raise RunStopped(
                f"every {self._kind} worker is lost, the last one with: {self._last_error}; if that names no cause, "
                f"look above for a crash in the {self._kind}, or for too little memory, where fewer {self._key} help. "
                "Then start again with trainer.resume_mode=auto, which continues after the last checkpoint"
            )
        others = [worker for worker in self._living if worker != other_than] or self._living
        chosen = self._choose(others)
        self._num_open[chosen] += 1
        return chosen

    def _choose(self, workers: Sequence[Any]) -> Any:
        fewest = min(self._num_open[worker] for worker in workers)
        return random.choice([worker for worker in workers if self._num_open[worker] == fewest])

    def release(self, worker: Any, error: BaseException | None = None) -> None:
        """Give a worker back; one that died permanently is removed."""
        self._num_open[worker] -= 1
        if isinstance(error, ActorDiedError) and worker in self._living:  # the first of its calls to see the error
            self._living.remove(worker)
            self._last_error = str(error).strip().splitlines()[-1]  # below the remote traceback
            logger.warning("a worker (%s) is lost, %d are left: %s", self._kind, len(self._living), error)

    async def answer(self, worker: Any, call: Awaitable[Any]) -> Any:
        """The answer of a remote call; no timeout while the worker is alive."""
        answering = asyncio.ensure_future(call)
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=self._answer_s)
                if not answering.done():
                    await self._require_life(worker)
        finally:
            answering.cancel()
        return answering.result()

    async def _require_life(self, worker: Any) -> None:
        """Kill the worker if it gives no sign of life; one check for all calls that wait for it."""
        if worker not in self._asked:
            self._asked[worker] = asyncio.create_task(self._end_if_silent(worker))
            self._asked[worker].add_done_callback(lambda asked: self._asked.pop(worker))
        await asyncio.shield(self._asked[worker])

    async def _end_if_silent(self, worker: Any) -> None:
        try:
            await asyncio.wait_for(worker.__ray_ready__.remote(), self._answer_s)
        except asyncio.TimeoutError:
            if is_starting(worker):  # or restarting
                return
            logger.error(
                "a worker (%s) gives no sign of life for %.0f s (digen.deadlines.answer_s): it is ended, and started "
                "again. Code of yours that holds Python's lock for so long looks the same",
                *(self._kind, self._answer_s),
            )
            ray.kill(worker, no_restart=False)
        except RayActorError as error:
            logger.warning("a worker (%s) is out of reach: %s", self._kind, error)  # its calls get the error themselves


class RewardWorkers(WorkerPool):
    """Client of the workers of one pool.

    Args:
        run: consecutive samples that go to the same worker, its batch size, so that it finds full batches.
    """

    def __init__(self, handles: Sequence[Any], answer_s: float, run: int = 1):
        super().__init__(handles, answer_s, "reward", "reward.num_workers or digen.reward.functions.NAME.num_workers")
        self._run = run
        self._chosen: Any = None
        self._num_left = 0
        """Further samples that go to the chosen worker."""

    async def score(self, *sample: Any) -> Any:
        """Score one sample or group -> the answer of the worker's `score`.

        Raises:
            ScoringError: the worker died on the sample too often. RunStopped: no worker is left.
        """
        while True:
            worker, lost = self.take(), None
            try:
                return await self.answer(worker, worker.score.remote(*sample))
            except ActorDiedError as error:
                lost = error
            except ActorUnavailableError as error:
                raise ScoringError(f"the reward worker died whenever it scored this sample: {error}") from error
            finally:
                self.release(worker, lost)

    def _choose(self, workers: Sequence[Any]) -> Any:
        """The worker of the last sample, until it has its run; then one of those with the fewest open samples."""
        if self._num_left == 0 or self._chosen not in workers:
            self._chosen, self._num_left = super()._choose(workers), self._run
        self._num_left -= 1
        return self._chosen
