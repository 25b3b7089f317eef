# SPDX-License-Identifier: Apache-2.0
"""The driver's watch over everything that it waits for: deadlines, the watchdog, heartbeats, patience.

| who waits | for what | ended by |
| --- | --- | --- |
| driver, in verl's blocking calls | weights, checkpoints | `watch`, `watch_files`: the watchdog kills what is silent |
| driver, for groups | prompts that end | `Patience`: nothing ended for `digen.deadlines.no_progress_s` |
| driver, for TransferQueue | its controller | `Heartbeats`: the process is lost |
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from ray.exceptions import RayError

from verl_digen.agent_loop.chunks import describe
from verl_digen.errors import DeadlineMissed, ProcessLost, RunStopped, plain
from verl_digen.processes.deadlines import Bound, CallKind, Deadlines, DeadlinesConfig
from verl_digen.schedulers.types import TRAINER
from verl_digen.store.client import cancel_calls, controller
from verl_digen.trainer.checkpoint import way_to_resume
from verl_digen.trainer.heartbeats import Heartbeats
from verl_digen.trainer.loop_thread import LoopThread
from verl_digen.trainer.patience import Patience
from verl_digen.trainer.watchdog import Watchdog

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class Supervision:
    """See the module.

    Args:
        loop: runs the driver's coroutines.
        scores_groups: a reward compares the samples of a group.
        step: the current step, for messages.
        end_silent_replicas: kills replicas that do not answer -> their addresses.
        end_all: kills every process of the run.
    """

    def __init__(
        self,
        config: DeadlinesConfig,
        *,
        loop: LoopThread,
        scores_groups: bool,
        step: Callable[[], int],
        end_silent_replicas: Callable[[], Awaitable[list[str]]],
        end_all: Callable[[], None],
        cancel_queue_calls: Callable[[], None] = cancel_calls,
    ):
        self.loop, self.step = loop, step
        self.deadlines = Deadlines(config, scores_groups)
        self.heartbeats = Heartbeats(loop.begin, config, cancel_queue_calls)
        self.patience = Patience(config, loop.time)
        self._watchdog = Watchdog(loop.begin, end_silent_replicas=end_silent_replicas, end_all=end_all)

    @contextmanager
    def watch(self, kind: CallKind, what: str) -> Iterator[None]:
        """Bound blocking calls of verl's, and learn from their durations."""
        began_s = self.loop.time()
        with self._watchdog.watch(f"step {self.step()}: {what}", self.deadlines.bound(kind, TRAINER)):
            yield
        self.deadlines.observe(kind, TRAINER, seconds=self.loop.time() - began_s)

    @contextmanager
    def watch_files(self, what: str) -> Iterator[None]:
        """Bound the writing or reading of a checkpoint."""
        bound = Bound(self.deadlines.config.setup_s, "digen.deadlines.setup_s")
        with self._watchdog.watch(what, bound):
            yield

    def watch_processes(self, agent_loop_workers: Sequence[Any]) -> None:
        """Detect lost processes wherever the driver waits."""
        self.heartbeats.watch("TransferQueue's controller", controller())
        for number, worker in enumerate(agent_loop_workers):
            self.heartbeats.watch(f"agent loop worker {number}", worker)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` and return its result; ProcessLost if a process that the run needs is lost."""
        return self.loop.run(self.heartbeats.unless_lost(work))

    @contextmanager
    def ends_explained(self, run_dir: Path) -> Iterator[None]:
        """Raise any exception that ends the run as RunStopped, with the way to resume."""
        try:
            yield
        except (DeadlineMissed, ProcessLost) as error:
            raise RunStopped(f"{error}; {way_to_resume(run_dir)}") from error
        except (RayError, CancelledError) as error:
            if self.heartbeats.lost is not None:  # it ended the call
                raise RunStopped(f"{self.heartbeats.lost}; {way_to_resume(run_dir)}") from error
            if isinstance(cause := plain(error), RunStopped):
                raise cause from error
            logger.error("step %d failed", self.step(), exc_info=error)
            raise RunStopped(f"step {self.step()} failed: {describe(error)}; {way_to_resume(run_dir)}") from error
