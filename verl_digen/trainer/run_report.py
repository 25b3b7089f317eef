# SPDX-License-Identifier: Apache-2.0
"""`RUN_DIR/report.html` while the run goes on: written again and again, whole, by a task beside the run.

- `refresh` never waits. It starts the task, unless one runs or the last one began too short ago: at least
  `MIN_INTERVAL_S`, and so that writing takes at most `MAX_SHARE` of one core's time.
- A report that cannot be written is a warning, and the run goes on. The page that is there stays.
- `finish` writes the last one, and waits for it.
- The task imports this file: what it imports costs each run seconds of a core.

Example:
    report = RunReport(run_dir, wait_s=600)
    report.refresh()  # starts a task
    report.refresh()  # nothing: it runs, or it began less than a minute ago
    report.finish()   # waits, writes once more
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import ray
from ray.exceptions import RayError

from verl_digen.errors import plain
from verl_digen.observe.run_files import REPORT
from verl_digen.report.page import write_report

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 60.0
MAX_SHARE = 0.05


def _write(run_dir: Path) -> float:
    """Write the report; returns the seconds that it took."""
    began_s = time.monotonic()
    write_report(run_dir, run_dir / REPORT)
    return time.monotonic() - began_s


class Task(Protocol):
    """A report that is being written, beside this process."""

    def is_done(self) -> bool:
        """True if `result` does not wait."""
        ...

    def result(self, wait_s: float) -> float:
        """The seconds that it took.

        Raises:
            RayError: it failed, or has not ended after `wait_s`.
        """
        ...


class RayTask:
    """`_write` in a Ray task."""

    def __init__(self, run_dir: Path):
        self._reference = ray.remote(num_cpus=0)(_write).remote(run_dir)

    def is_done(self) -> bool:
        return bool(ray.wait([self._reference], timeout=0)[0])

    def result(self, wait_s: float) -> float:
        return ray.get(self._reference, timeout=wait_s)


class RunReport:
    """See the module.

    Args:
        wait_s: bound of `finish`.
        begin: starts writing the report of a run's folder.
        now_s: a clock.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        wait_s: float,
        begin: Callable[[Path], Task] = RayTask,
        now_s: Callable[[], float] = time.monotonic,
    ):
        self._run_dir, self._wait_s = run_dir, wait_s
        self._begin, self._now_s = begin, now_s
        self._running: Task | None = None
        self._due_s = float("-inf")
        self._began_s = 0.0

    def refresh(self) -> None:
        """Start writing, if it is due."""
        if self._running is not None:
            if not self._running.is_done():
                return
            self._end(self._running, 0.0)
        if self._now_s() >= self._due_s:
            self._start()

    def finish(self) -> None:
        """Write the whole run."""
        if self._running is not None:
            self._end(self._running, self._wait_s)
        self._end(self._start(), self._wait_s)

    def _start(self) -> Task:
        self._began_s = self._now_s()
        self._due_s = self._began_s + MIN_INTERVAL_S
        self._running = self._begin(self._run_dir)
        return self._running

    def _end(self, task: Task, wait_s: float) -> None:
        self._running = None
        try:
            spent_s = task.result(wait_s)
        except RayError as error:
            logger.warning(
                "%s could not be written (%s); the run goes on, and `digen report %s` writes it",
                *(self._run_dir / REPORT, plain(error), self._run_dir),
            )
            return
        self._due_s = max(self._due_s, self._began_s + spent_s / MAX_SHARE)
