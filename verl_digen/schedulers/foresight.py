# SPDX-License-Identifier: Apache-2.0
"""Tracker of the search's prediction errors: predicted against real end of each batch.

The makespan model leaves things out: pools that share a host or its memory slow each other down, speeds drift. A gain
smaller than the model's usual error may be a loss, so an assist must gain more than `DOUBTS` mean errors over waiting,
relative to the time left. An error that speaks against assists counts in full. Any other one shows that the model is
inexact, which makes small gains doubtful, and counts at most `INEXACT`:

| in the batch the trainer | training ended before the prediction | after it |
| --- | --- | --- |
| did not assist | in full: waiting was better than predicted | at most INEXACT |
| assisted | at most INEXACT | in full: assisting was worse than predicted |

Invariant: while all predictions were exact, or there was none, any gain counts.
"""

from __future__ import annotations

from verl_digen.schedulers.durations import RunningMean
from verl_digen.schedulers.play import EPSILON_S
from verl_digen.schedulers.search import Verdict

DOUBTS = 2.0
"""Margin of a gain, in mean errors."""

INEXACT = 0.02
"""Most that an error counts which does not speak against assists."""


class Foresight:
    """Prediction errors over consecutive batches.

    Example:
        foresight = Foresight()
        foresight.on_verdict(verdict, now_s=10.0)   # says that training ends in 5 s
        foresight.on_end(now_s=16.0)                # it took 6 s
        foresight.prediction_error                  # -1/6
        foresight.counts(verdict)                   # now True only if the gain is more than a third of the time left
    """

    def __init__(self) -> None:
        self.num_searches = 0
        """Verdicts on the current batch."""
        self.prediction_error: float | None = None
        """(predicted - real) / real time from the first verdict to the end of training, for the last batch that ended;
        None if nothing was predicted."""
        self._predicted: tuple[float, float] | None = None
        """(time of the batch's first prediction, the end it predicted)."""
        self._assists = False
        """True once a verdict on the batch was followed by an assist."""
        self._error = RunningMean()

    @property
    def doubt(self) -> float:
        """Mean of what the errors count; 0 before the first comparison."""
        return self._error.value or 0.0

    def on_verdict(self, verdict: Verdict, now_s: float) -> None:
        """Record a verdict of the search; `counts` says which choice was followed."""
        self.num_searches += 1
        counts = self.counts(verdict)
        self._assists |= counts and verdict.choice == "assist"
        if self._predicted is None:
            self._predicted = now_s, now_s + (verdict.makespan_s if counts else verdict.waiting_s)

    def counts(self, verdict: Verdict) -> bool:
        """True if the gain exceeds the error margin, or if the choice is to wait."""
        return verdict.choice == "wait" or verdict.gain_s > DOUBTS * self.doubt * verdict.waiting_s

    def on_end(self, now_s: float) -> None:
        """The last fragment of the batch is trained."""
        self.prediction_error = None
        if self._predicted is not None:
            made_s, predicted_s = self._predicted
            if now_s - made_s > EPSILON_S:
                self.prediction_error = (predicted_s - now_s) / (now_s - made_s)
                against = -self.prediction_error if self._assists else self.prediction_error
                self._error.add(max(against, min(-against, INEXACT)))

    def on_next_batch(self) -> None:
        """The batch is committed."""
        self.num_searches = 0
        self._predicted, self._assists = None, False
