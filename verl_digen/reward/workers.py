# SPDX-License-Identifier: Apache-2.0
"""Client of the reward workers: a worker that dies costs time, not samples.

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
from collections.abc import Sequence
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

ALL_LOST = (
    "every reward worker is lost, the last one with: {error}; if that names no cause, look above for a crash in a "
    "reward function, or for too little memory, where fewer reward.num_workers help. Then start again with "
    "trainer.resume_mode=auto, which continues after the last checkpoint"
)


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


class RewardWorkers:
    """See the module.

    Args:
        handles: handles of workers started with `RestartingActor`.
        answer_s: `digen.deadlines.answer_s`. A worker that scores for longer is asked for a sign of life.
        run: consecutive samples that go to the same worker, its batch size, so that it finds full batches.
    """

    def __init__(self, handles: Sequence[Any], answer_s: float, run: int = 1):
        self._living = list(handles)
        self._run = run
        self._num_open: Counter[Any] = Counter()
        """Worker -> samples that it has from here."""
        self._chosen: Any = None
        self._num_left = 0
        """Further samples that go to the chosen worker."""
        self._answer_s = answer_s
        self._asked: dict[Any, asyncio.Task[None]] = {}
        self._last_error = "none was started"

    async def score(self, data: Any) -> Any:
        """Score one sample -> the answer of the worker's `compute_score`.

        Raises:
            ScoringError: the worker died on the sample too often. RunStopped: no worker is left.
        """
        while self._living:
            worker = self._choose()
            self._num_open[worker] += 1
            try:
                return await self._score_on(worker, data)
            except ActorDiedError as error:
                if worker in self._living:  # the first of its samples to see the error
                    self._living.remove(worker)
                    self._last_error = str(error).strip().splitlines()[-1]  # below the remote traceback
                    logger.warning("a reward worker is lost, %d are left: %s", len(self._living), error)
            except ActorUnavailableError as error:
                raise ScoringError(f"the reward worker died whenever it scored this sample: {error}") from error
            finally:
                self._num_open[worker] -= 1
        raise RunStopped(ALL_LOST.format(error=self._last_error))

    def _choose(self) -> Any:
        """The worker of the last sample, until it has its run; then one of those with the fewest open samples."""
        if self._num_left == 0 or self._chosen not in self._living:
            fewest = min(self._num_open[worker] for worker in self._living)
            self._chosen = random.choice([worker for worker in self._living if self._num_open[worker] == fewest])
            self._num_left = self._run
        self._num_left -= 1
        return self._chosen

    async def _score_on(self, worker: Any, data: Any) -> Any:
        """The worker's answer; no timeout while the worker is alive."""
        scoring = asyncio.ensure_future(worker.compute_score.remote(data))
        try:
            while not scoring.done():
                await asyncio.wait([scoring], timeout=self._answer_s)
                if not scoring.done():
                    await self._require_life(worker)
        finally:
            scoring.cancel()
        return scoring.result()

    async def _require_life(self, worker: Any) -> None:
        """Kill the worker if it gives no sign of life; one check for all samples that wait for it."""
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
                "a reward worker gives no sign of life for %.0f s (digen.deadlines.answer_s): it is ended, and started "
                "again. A reward function that holds Python's lock for so long looks the same",
                self._answer_s,
            )
            ray.kill(worker, no_restart=False)
        except RayActorError as error:
            logger.warning("a reward worker is out of reach: %s", error)  # its samples get the error themselves
