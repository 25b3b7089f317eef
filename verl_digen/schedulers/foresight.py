# SPDX-License-Identifier: Apache-2.0
"""How far the search's predictions can be trusted: what it said of each batch, and what came.

The makespan model leaves things out: pools that share a host or its memory slow each other down, speeds drift. A gain
smaller than what the model is usually wrong by may be a loss, so an assist must promise `DOUBTS` mean errors more than
waiting.

Invariants
- Predictions that were exact so far, or none: any gain counts.
- The doubt is relative, so it means the same at the start and at the end of a batch.
"""

from __future__ import annotations

from verl_digen.schedulers.durations import RunningMean
from verl_digen.schedulers.search import EPSILON_S, Verdict

DOUBTS = 2.0
"""Mean absolute errors that a gain must exceed: errors of a normal distribution exceed this one time in nine."""


class Foresight:
    """Of one batch after another.

    Example:
        foresight = Foresight()
        foresight.on_verdict(verdict, now_s=10.0)   # says that training ends in 5 s
        foresight.on_end(now_s=16.0)                # it took 6 s
        foresight.prediction_error                  # -1/6
        foresight.counts(verdict)                   # from now on, a gain of more than a third of the time left does
    """

    def __init__(self) -> None:
        self.num_searches = 0
        """Verdicts on the batch under way."""
        self.prediction_error: float | None = None
        """Of the batch that ended last: (predicted - real) / real time from its first verdict to the end of its
        training; None if nothing was predicted."""
        self._predicted: tuple[float, float] | None = None
        """When the first prediction of the batch was made, and the end it named."""
        self._error = RunningMean()

    @property
    def doubt(self) -> float:
        """Mean absolute `prediction_error`; 0 while no prediction was compared."""
        return self._error.value or 0.0

    def on_verdict(self, verdict: Verdict, now_s: float) -> None:
        """The search has spoken; `counts` says which choice was followed."""
        self.num_searches += 1
        if self._predicted is None:
            ends_in_s = verdict.makespan_s if self.counts(verdict) else verdict.waiting_s
            self._predicted = now_s, now_s + ends_in_s

    def counts(self, verdict: Verdict) -> bool:
        """Whether the gain is beyond the doubt, or there is none to gain."""
        return verdict.choice == "wait" or verdict.gain_s > DOUBTS * self.doubt * verdict.waiting_s

    def on_end(self, now_s: float) -> None:
        """The last fragment of the batch is trained."""
        self.prediction_error = None
        if self._predicted is not None:
            made_s, predicted_s = self._predicted
            if now_s - made_s > EPSILON_S:
                self.prediction_error = (predicted_s - now_s) / (now_s - made_s)
                self._error.add(abs(self.prediction_error))

    def on_next_batch(self) -> None:
        """The batch is committed."""
        self.num_searches = 0
        self._predicted = None
