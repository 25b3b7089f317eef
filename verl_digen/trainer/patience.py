# SPDX-License-Identifier: Apache-2.0
"""Timeout of a polling wait: how long a count may stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable

from verl_digen.errors import DeadlineMissed
from verl_digen.processes.deadlines import DeadlinesConfig

logger = logging.getLogger(__name__)


class Patience:
    """Example:
    patience = Patience(config, time.monotonic)
    while (num_ended := count_ended()) < num_prompts:
        patience.check(num_ended, "validation")    # DeadlineMissed after digen.deadlines.no_progress_s without progress
        time.sleep(poll_s)
    """

    def __init__(self, config: DeadlinesConfig, now_s: Callable[[], float]):
        self._config, self._now_s = config, now_s
        self.restart()

    def restart(self) -> None:
        """Begin a new wait."""
        self._last: int | None = None

    def check(self, num_ended: int, what: str) -> None:
        """Compare the count with the previous one.

        Args:
            what: a noun phrase that names who is waited for.

        Raises:
            DeadlineMissed: it has not changed for `digen.deadlines.no_progress_s`.
        """
        now_s = self._now_s()
        if num_ended != self._last:
            self._last, self._since_s, self._report_in_s = num_ended, now_s, self._config.report_s
            return
        waited_s = now_s - self._since_s
        if waited_s > self._config.no_progress_s:
            raise DeadlineMissed(what, waited_s, "digen.deadlines.no_progress_s")
        if waited_s > self._report_in_s:
            logger.warning("nothing happened for %.0f s; waiting for %s", waited_s, what)
            self._report_in_s *= 2
