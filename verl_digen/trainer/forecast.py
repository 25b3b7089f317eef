# SPDX-License-Identifier: Apache-2.0
"""How well a batch's end was predicted, and what deciding cost: the planner's decisions as metrics.

| metric | unit | meaning |
| --- | --- | --- |
| `tag/num_assists` | chunks | that the trainer generated |
| `bts/num_searches` | decisions | at a bubble, with a prediction |
| `bts/decision_ms_max` | ms | the slowest decision about the trainer |
| `bts/prediction_error` | | of the first prediction: (predicted - real end of training) / real duration of the batch |

The last two are there only if something was predicted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from verl_digen.schedulers.types import Assist, TrainerDecision, Wait


class Forecast:
    """Of one batch after another."""

    def begin(self, now_s: float) -> None:
        """A batch begins."""
        self._began_s = now_s
        self._trained_s = now_s
        self._num_assists = self._num_searches = 0
        self._slowest_s = 0.0
        self._first_predicted_s: float | None = None

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Around the planner's decision."""
        started_s = time.perf_counter()
        yield
        self._slowest_s = max(self._slowest_s, time.perf_counter() - started_s)

    def on_decision(self, decision: TrainerDecision, now_s: float) -> None:
        """The planner has decided what the trainer does."""
        if isinstance(decision, Assist):
            self._num_assists += 1
        if isinstance(decision, Assist | Wait) and decision.makespan_s is not None:
            self._num_searches += 1
            if self._first_predicted_s is None:
                self._first_predicted_s = now_s + decision.makespan_s

    def on_trained(self, now_s: float) -> None:
        """The last fragment of the batch is trained."""
        self._trained_s = now_s

    def metrics(self) -> dict[str, float]:
        """Of the batch."""
        metrics = {"tag/num_assists": float(self._num_assists)}
        if self._first_predicted_s is not None:
            duration_s = self._trained_s - self._began_s
            metrics |= {
                "bts/num_searches": float(self._num_searches),
                "bts/decision_ms_max": 1e3 * self._slowest_s,
                "bts/prediction_error": (self._first_predicted_s - self._trained_s) / duration_s,
            }
        return metrics
