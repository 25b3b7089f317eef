# SPDX-License-Identifier: Apache-2.0
"""Wrong predictions make the trainer careful; exact ones change nothing."""

from dataclasses import dataclass, replace

import pytest

from tests.schedulers.flat import make_rules
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.search import Foresight, SearchVerdict
from verl_digen.schedulers.simulation import PlannerRun

ASSIST = SearchVerdict(1, makespan_s=9.0, waiting_s=10.0, wait_until_s=2.0)
WAIT = SearchVerdict(0, makespan_s=10.0, waiting_s=10.0, wait_until_s=2.0)


def foresight_of(*ends_s: float) -> Foresight:
    """A tracker after batches that were predicted to end in 10 s and ended after `ends_s`."""
    foresight = Foresight()
    for end_s in ends_s:
        foresight.on_verdict(WAIT, 100.0)
        foresight.on_end(100.0 + end_s)
        foresight.on_next_batch()
    return foresight


def test_any_gain_counts_while_no_prediction_was_wrong():
    tiny = replace(ASSIST, makespan_s=10.0 - 1e-6)
    assert foresight_of().counts(tiny) and foresight_of(10.0, 10.0).counts(tiny)


def test_a_gain_counts_beyond_twice_the_mean_error():
    foresight = foresight_of(10.0, 10.0 / 1.06, 10.0 / 0.96)  # waiting took less than predicted, then more
    assert foresight.doubt == pytest.approx((0.06 + 0.02) / 2)
    assert foresight.counts(ASSIST), "a gain of 10 %"
    assert not foresight.counts(replace(ASSIST, makespan_s=9.3)), "a gain of 7 %"
    assert foresight.counts(WAIT)


@pytest.mark.parametrize(
    ("verdicts", "took_s", "doubt"),
    [
        ([WAIT], 8.0, 0.25),
        ([WAIT], 12.5, 0.02),
        ([WAIT], 10.0 / 0.99, 0.01),
        ([ASSIST], 6.0, 0.02),  # it ended in two thirds of the time: no reason to stop assisting
        ([ASSIST], 12.0, 0.25),
        ([WAIT, ASSIST], 8.0, 0.02),
        ([WAIT, ASSIST], 12.5, 0.2),
    ],
)
def test_an_error_counts_in_full_only_if_it_speaks_against_assists(verdicts, took_s, doubt):
    foresight = Foresight()
    for verdict in verdicts:
        foresight.on_verdict(verdict, 0.0)
    foresight.on_end(took_s)
    assert foresight.doubt == pytest.approx(doubt)


def test_an_assist_of_the_batch_before_says_nothing_about_this_one():
    foresight = Foresight()
    foresight.on_verdict(ASSIST, 0.0)
    foresight.on_end(9.0)
    foresight.on_next_batch()
    foresight.on_verdict(WAIT, 20.0)
    foresight.on_end(28.0)
    assert foresight.doubt == pytest.approx(0.25)


def test_the_first_prediction_of_a_batch_is_the_one_that_is_compared():
    foresight = Foresight()
    foresight.on_verdict(ASSIST, 100.0)
    foresight.on_verdict(WAIT, 105.0)
    foresight.on_end(112.0)
    assert foresight.prediction_error == pytest.approx((9.0 - 12.0) / 12.0) and foresight.num_searches == 2
    foresight.on_next_batch()
    foresight.on_end(120.0)
    assert foresight.prediction_error is None and foresight.num_searches == 0


def test_what_is_predicted_is_what_is_followed():
    foresight = foresight_of(5.0)
    foresight.on_verdict(ASSIST, 0.0)  # in doubt: the trainer waits
    foresight.on_end(10.0)
    assert foresight.prediction_error == pytest.approx(0.0)


@dataclass(frozen=True)
class Misjudged(KnownDurations):
    """Durations that overstate the slots' seconds per sample by `factor`, so that assists look better than they are."""

    factor: float = 1.0

    def generate_sample_s(self, slot: str) -> float | None:
        return self.factor * self.sample_s[slot]


def run(assist, *, factor, assist_s, num_batches=20):
    durations = Misjudged({"a": 0.8}, [assist_s], 0.05, [1.3, 2.6, 3.9, 5.2], factor=factor)
    rules = make_rules(num_prompts=8, group_size=1, max_groups_per_fragment=4, assist=assist)
    played = PlannerRun(rules, durations, ["a"], num_batches=num_batches, commit_s=0.1)
    played.play()
    return played


def test_a_misjudged_slot_costs_a_trainer_bound_run_little():
    """One slot, faster than believed: assists cost more time than they save."""
    without, trusting = run("off", factor=1.3, assist_s=1.0), run("bts", factor=1.3, assist_s=1.0)
    assert trusting.reports[0].num_assists > 0, "the first batch believes"
    assert all(report.num_assists == 0 for report in trusting.reports[2:]), "later ones know better"
    assert trusting.commits_s[-1] < 1.005 * without.commits_s[-1]


def test_exact_predictions_keep_every_assist_that_pays():
    without, played = run("off", factor=1.0, assist_s=0.4), run("bts", factor=1.0, assist_s=0.4)
    assert all(report.num_assists > 0 for report in played.reports)
    assert all(abs(report.prediction_error) < 1e-6 for report in played.reports)
    assert played.commits_s[-1] < without.commits_s[-1]
