# SPDX-License-Identifier: Apache-2.0
"""Bubble-triggered search: at a bubble, should the trainer wait or generate samples itself, and how many?

A bubble is a moment at which the trainer has no ready fragment while the batch is incomplete. The search plays the rest
of the batch forward on a makespan model and returns the choice that ends it first.

- A trainer that waits does so until the next fragment is ready: an assist that starts later, with nothing trained in
  between, generates the same samples and ends later, so it is never better.
- An assist that has begun runs to its end, also if a fragment is ready sooner than predicted. Training it releases
  nothing but the commit, so it loses nothing by going second, and the assist's samples come earlier.
- Branching is exact for the first choices and heuristic after (`schedulers.play`). Iterative deepening until `MAX_WORK`
  simulated chunks are used up: a small remainder of a batch is searched exhaustively, a large one hardly beyond the
  heuristic plans. The next bubble is searched anew.

Invariants: an assist is chosen only where it shortens the makespan under the model by more than `EPSILON_S`. Equal
input gives equal output: the budget counts work, not time.

Complexity of a decision, with U unissued chunks of bundles, M groups and S bundles: O(MAX_WORK) simulated chunks, plus
O((U + M) * STOPS_TRIED * sizes) for the leaf at the root; a chunk costs O(log S + log M), a choice O(S).

`Foresight` tracks the search's prediction errors: predicted against real end of each batch. The makespan model leaves
things out: pools that share a host or its memory slow each other down, speeds drift. A gain smaller than the model's
usual error may be a loss, so an assist must gain more than `DOUBTS` mean errors over waiting, relative to the time
left. An error that speaks against assists counts in full. Any other one shows that the model is inexact, which makes
small gains doubtful, and counts at most `INEXACT`:

| in the batch the trainer | training ended before the prediction | after it |
| --- | --- | --- |
| did not assist | in full: waiting was better than predicted | at most INEXACT |
| assisted | at most INEXACT | in full: assisting was worse than predicted |

Invariant: while all predictions were exact, or there was none, any gain counts.
"""

from dataclasses import dataclass
from functools import lru_cache

from verl_digen.schedulers.durations import RunningMean
from verl_digen.schedulers.play import EPSILON_S, MAX_WORK, WAIT, Bubble, Choice, Play


@dataclass(frozen=True)
class SearchVerdict:
    """Choice at a bubble, and its predictions."""

    num_samples: Choice
    """Samples that the trainer generates; 0: it waits."""
    makespan_s: float
    """Predicted end of the batch's last training call, from now, if the plan found is followed."""
    waiting_s: float
    """Predicted end if the trainer never assists again."""
    wait_until_s: float
    """When the next fragment will be ready if the trainer waits, from now."""

    @property
    def gain_s(self) -> float:
        """waiting_s - makespan_s."""
        return self.waiting_s - self.makespan_s


@lru_cache(maxsize=4096)  # simulated batches have the same bubbles again and again
def decide(bubble: Bubble) -> SearchVerdict:
    """The choice that ends the batch first under the model; to wait on a tie."""
    play = Play(bubble)
    root = play.root()
    waiting_s = play.never(root)
    best, choice = play.leaf(root)
    depth = 0
    next_level_work = play.work  # a level has twice the leaves of the one before, which share half of their work
    play.truncated = play.can_assist(root)
    while play.truncated and play.work + next_level_work <= MAX_WORK:
        depth += 1
        play.truncated = False
        work_before = play.work
        value, found = play.best(root, depth)
        next_level_work = 2 * (play.work - work_before)
        if value < best - EPSILON_S:
            best, choice = value, found
    if best >= waiting_s - EPSILON_S:
        best, choice = waiting_s, WAIT
    return SearchVerdict(choice, best, waiting_s, play.until_ready(root)[1])


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

    def on_verdict(self, verdict: SearchVerdict, now_s: float) -> None:
        """Record a verdict of the search; `counts` says which choice was followed."""
        self.num_searches += 1
        counts = self.counts(verdict)
        self._assists |= counts and verdict.num_samples > 0
        if self._predicted is None:
            self._predicted = now_s, now_s + (verdict.makespan_s if counts else verdict.waiting_s)

    def counts(self, verdict: SearchVerdict) -> bool:
        """True if the gain exceeds the error margin, or if the choice is to wait."""
        return verdict.num_samples == WAIT or verdict.gain_s > DOUBTS * self.doubt * verdict.waiting_s

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
