# SPDX-License-Identifier: Apache-2.0
"""Worker processes of rewards and environments: a death costs time, not samples.

| event | consequence |
| --- | --- |
| a worker's process dies | Ray restarts it, at most `MAX_RESTARTS` times per run, and retries its open calls |
| it gives no sign of life for `digen.deadlines.answer_s` | it is killed, so that it restarts |
| it dies on a call that several samples share | each is called alone |
| it dies 1 + `max_retries` times on a call | the call raises `ActorUnavailableError` |
| it is dead permanently | it is removed, and its calls go to the others |
| all are dead permanently | `RunStopped` |

Invariant (tests/processes/test_workers.py): a call gets its own answer or an error, never another call's.
"""

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Sequence
from copy import copy
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError

from verl_digen.errors import RunStopped
from verl_digen.processes.actors import MAX_CALLS, silence, while_alive
from verl_digen.processes.bundles import Bundles, given
from verl_digen.processes.deadlines import DeadlinesConfig

logger = logging.getLogger(__name__)

MAX_RESTARTS = 20
"""Maximum restarts of one worker per run. A broken worker would otherwise be restarted forever."""

MAX_BUNDLE = 32
"""Maximum samples that are sent to a worker in one call; the call ends with the slowest of them."""

_KEPT: list[Any] = []
"""References to the constructor arguments of all workers that were started here: Ray drops a large argument once an
actor has started, and could not restart it (2.60)."""


class RestartingActor:
    """Ray actor class of a worker that restarts after a crash; used like Ray's own actor classes. Ray retries a call on
    which the worker died at most `max_retries` times."""

    def __init__(self, worker_class: type, max_retries: int, **options: Any):
        self._actor: Any = ray.remote(worker_class)
        self._options = {
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": max_retries,
            "max_concurrency": MAX_CALLS,
            **options,
        }

    def options(self, **options: Any) -> "RestartingActor":
        """A copy with further actor options."""
        derived = copy(self)
        derived._options = {**self._options, **options}
        return derived

    def remote(self, *args: Any) -> Any:
        """Start a worker -> its handle."""
        references = [ray.put(argument) for argument in args]
        _KEPT.extend(references)
        return self._actor.options(**self._options).remote(*references)


class WorkerPool:
    """Client of workers of one kind, started with `RestartingActor`. Messages have the `kind`, and the config `key` of
    their number. `run` consecutive calls go to the same worker, its batch size, so that it finds full batches."""

    def __init__(self, handles: Sequence[Any], config: DeadlinesConfig, *, kind: str, key: str, run: int = 1):
        self._living = list(handles)
        self._config, self._kind, self._key, self._run = config, kind, key, run
        self._num_open: Counter[Any] = Counter()
        """Worker -> samples or episodes that it has from here."""
        self._bundles = Bundles(self._send, size=MAX_BUNDLE, key=lambda item: item[:2])
        self._chosen: Any = None
        self._num_left = 0
        """Further calls that go to the chosen worker."""
        self._checks: dict[Any, asyncio.Task[None]] = {}
        self._last_error = "none was started"

    async def call(self, method: str, *arguments: Any) -> Any:
        """The answer of one worker; of another one if that is dead permanently. ActorUnavailableError if workers died
        of the call too often, RunStopped if no worker is left."""
        while True:
            worker, lost = self.take(), None
            try:
                return await self.answer(worker, getattr(worker, method).remote(*arguments))
            except ActorDiedError as error:
                lost = error
            finally:
                self.release(worker, lost)

    async def call_together(self, method: str, item: Any) -> Any:
        """The answer to one item of `method`, which takes items and returns their `outcomes`: in one call with others
        of the same pass of the event loop. If the worker dies, of which any of them may be the cause, in a call alone.
        Errors: the item's, or what `call` raises."""
        worker, lost = self.take(), None
        try:
            return await self._bundles.call((worker, method, item))
        except RayActorError as error:
            lost = error
        finally:
            self.release(worker, lost)
        return given(*await self.call(method, [item]))

    async def _send(self, bundle: Sequence[tuple[Any, str, Any]]) -> list[Any]:
        worker, method, _ = bundle[0]
        call = getattr(worker, method).options(max_task_retries=0)
        return await self.answer(worker, call.remote([item for *_, item in bundle]))

    def take(self, other_than: Any = None) -> Any:
        """Choose the worker of the last call, until it has its run; then one of those with the fewest open calls, and
        another one than given where there is one. RunStopped if no worker is left."""
        if not self._living:
            raise RunStopped(
                f"every {self._kind} worker is lost, the last one with: {self._last_error}; if that names no cause, "
                f"look above for a crash in the {self._kind}, or for too little memory, where fewer {self._key} help"
            )
        others = [worker for worker in self._living if worker != other_than] or self._living
        if self._num_left == 0 or self._chosen not in others:
            fewest = min(self._num_open[worker] for worker in others)
            self._chosen = random.choice([worker for worker in others if self._num_open[worker] == fewest])
            self._num_left = self._run
        self._num_left -= 1
        self._num_open[self._chosen] += 1
        return self._chosen

    def release(self, worker: Any, error: BaseException | None = None) -> None:
        """Give a worker back; one that died permanently is removed."""
        self._num_open[worker] -= 1
        if isinstance(error, ActorDiedError) and worker in self._living:  # the first of its calls to see the error
            self._living.remove(worker)
            self._last_error = str(error).strip().splitlines()[-1]  # below the remote traceback
            logger.warning("a worker (%s) is lost, %d are left: %s", self._kind, len(self._living), error)

    async def answer(self, worker: Any, call: Awaitable[Any]) -> Any:
        """The answer of a remote call; no timeout while the worker is alive."""
        return await while_alive(call, lambda: self._config.answer_s, lambda: self._check(worker))

    async def _check(self, worker: Any) -> None:
        """End the worker if it hangs; one check for all calls that wait for it."""
        if worker not in self._checks:
            self._checks[worker] = asyncio.create_task(self._end_if_silent(worker))
            self._checks[worker].add_done_callback(lambda check: self._checks.pop(worker))
        await asyncio.shield(self._checks[worker])

    async def _end_if_silent(self, worker: Any) -> None:
        error = await silence(worker, self._config)
        if isinstance(error, asyncio.TimeoutError):
            logger.error(
                "a worker (%s) gives no sign of life for %.0f s (digen.deadlines.answer_s): it is ended, and started "
                "again. Code of yours that holds Python's lock for so long looks the same",
                *(self._kind, self._config.answer_s),
            )
            ray.kill(worker, no_restart=False)
        elif error is not None:
            logger.warning("a worker (%s) is out of reach: %s", self._kind, error)  # its calls get the error themselves
