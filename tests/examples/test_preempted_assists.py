# SPDX-License-Identifier: Apache-2.0
"""Interrupted assists, simulated: time and samples are conserved, and docs/baselines.md shows what comes out."""

from dataclasses import replace

import pytest

from tests.simulate.page import ROOT, TEXT, as_row, block
from verl_digen.devices import Pool
from verl_digen.schedulers.simulation import PlannerRun
from verl_digen.simulate.cluster import Split, durations_of, simulated_rules
from verl_digen.simulate.profile import load_profile

FOLDERS = (ROOT / "examples",)
pytestmark = pytest.mark.usefixtures("examples")

WAN, QWEN = load_profile("wan2.1-14b"), load_profile("qwen-image-20b")
WAN_SPLIT = Split(Pool(29, "H800"), Pool(3, "H800"))
QWEN_SPLIT = Split(Pool(15, "H800"), Pool(1, "H800"))
SEEDS = range(6)


@pytest.fixture
def cases():
    from preempted_assists import Case

    return [Case(WAN, WAN_SPLIT, 0.3), Case(QWEN, QWEN_SPLIT, 0.3, 0.5)]


def test_whole_assists_without_noise_are_the_simulators_run():
    from preempted_assists import TECHNIQUES, Case, go_on

    rules = simulated_rules(WAN, WAN_SPLIT, TECHNIQUES)
    slots = ["slot00000", "slot00001", "slot00002"]
    durations = durations_of(WAN, WAN_SPLIT, slots, rules, has_tsp=True)
    plain = PlannerRun(rules, durations, slots, num_batches=4, commit_s=WAN.numbers.commit_s, keeps_events=False)
    plain.play()
    run = Case(WAN, WAN_SPLIT, 0.0, num_batches=4).play(0, go_on)
    assert run.commits_s == pytest.approx(plain.commits_s)
    assert run.reports == plain.reports


def test_a_paused_assist_has_all_of_its_seconds_and_the_fragment_begins_at_a_step(cases):
    from preempted_assists import PreemptedRun, pause

    steps = []

    class Watched(PreemptedRun):
        def _tell(self, now_s, what, subject):
            if what == "pause" and subject is self.planner.assist:
                rounds = self.rules.assist_rounds(subject.num_samples)
                step_s, decode_s = self.step_s(rounds, self.durations.assisted_s[rounds - 1])
                steps.append((self.left_s(now_s) - decode_s) / step_s)
            if what == "assist":
                done[subject.chunks[0].id] = done.get(subject.chunks[0].id, 0.0) + now_s - self._since_s
                whole = self.durations.assisted_s[self.rules.assist_rounds(subject.num_samples) - 1]
                assert done.pop(subject.chunks[0].id) == pytest.approx(whole)
            elif what == "pause":
                key = subject.chunks[0].id
                done[key] = done.get(key, 0.0) + now_s - self._since_s
            return super()._tell(now_s, what, subject)

    for case in cases:
        for seed in SEEDS:
            done: dict[int, float] = {}
            run = case.play(seed, pause, Watched)
            assert not done
            assert run.reports[0].num_samples == case.profile.numbers.num_prompts * case.profile.numbers.group_size
    assert steps
    assert [abs(left - round(left)) < 1e-6 and left > 0.5 for left in steps] == [True] * len(steps)


def test_samples_that_are_given_back_are_generated_once_more_and_trained_once(cases):
    from preempted_assists import go_on

    num_returned = 0
    for case in cases:
        for seed in SEEDS:
            run = case.play(seed, lambda run, now_s: "give_back" if run.num_questions == 0 else "go_on")
            (report,) = run.reports
            assert report.num_samples == case.profile.numbers.num_prompts * case.profile.numbers.group_size
            assert report.dropped == {}
            num_returned += report.num_assisted < case.play(seed, go_on).reports[0].num_assisted
            assert run.busy_s["trainer"] <= run.commits_s[-1] + 1e-6
    assert num_returned


def test_the_rule_that_predicts_changes_nothing_by_asking(cases):
    from preempted_assists import give_back_if_earlier, go_on

    def ask(run, now_s):
        give_back_if_earlier(run, now_s)
        return "go_on"

    for case in cases:
        assert case.play(1, ask).commits_s == case.play(1, go_on).commits_s


def test_the_prediction_of_an_assist_that_goes_on_is_right_without_noise(cases):
    """The planner's own model, at the moment of the question: the batch's last training call, before the commit."""
    ends = []

    def ask(run, now_s):
        goes_on_s, _ = run.planner.predicted_ends_s(now_s, run.left_s(now_s))
        ends.append(now_s + goes_on_s)
        return "go_on"

    for case in cases:
        ends.clear()
        run = replace(case, noise=0.0).play(0, ask)
        assert ends
        assert ends == pytest.approx([run.commits_s[-1] - case.profile.numbers.commit_s] * len(ends), rel=0.003)


def test_hindsight_is_never_later_and_sometimes_earlier(cases):
    from preempted_assists import go_on, hindsight_s

    gains = [case.play(seed, go_on).commits_s[-1] - hindsight_s(case, seed) for case in cases for seed in SEEDS]
    assert min(gains) >= 0
    assert max(gains) > 0


def test_the_page_shows_what_comes_out():
    from preempted_assists import NAME, NUM_BATCHES, filled, row, split_of, strict

    lines = block(NAME)
    assert len(lines) == 2 + 4 * 3
    assert filled(TEXT, {NAME: lines}) == TEXT
    split = split_of(WAN, 32, 0, tcss=False)
    assert split == WAN_SPLIT
    assert as_row(row(WAN, split, strict, NUM_BATCHES)) in lines
