# SPDX-License-Identifier: Apache-2.0
"""`simulate`: small cases by hand, and invariants of every run."""

import random
import re
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

import verl_digen.schedulers
from tests.schedulers.workload import Costs, Workload, simulate

COSTS = Costs(generate_s=1.0, assist_s=1.2, score_s=0.1, train_s=0.2, commit_s=0.3)
EIGHT = Workload(num_fragments=8, num_slots=2)


@pytest.mark.parametrize(
    ("techniques", "makespan_s"),
    [
        # four waves of generation, the last scored at 4.1, then 8 x 0.2 of training, then the commit
        (set(), 4.1 + 8 * 0.2 + 0.3),
        # all but the last wave's two fragments are trained by then
        ({"gap"}, 4.1 + 2 * 0.2 + 0.3),
        # the trainer generates two chunks; it is busy from the start to the end
        ({"gap", "tag"}, 2 * 1.2 + 8 * 0.2 + 0.3),
        # the trainer generates two chunks, so three waves do
        ({"tag"}, 3.1 + 8 * 0.2 + 0.3),
        # a single step has no next step to begin early
        ({"gap", "tag", "tcss"}, 2 * 1.2 + 8 * 0.2 + 0.3),
    ],
)
def test_eight_fragments_on_two_slots_by_hand(techniques, makespan_s):
    assert simulate(EIGHT, COSTS, techniques).makespan_s == pytest.approx(makespan_s)


def test_tcss_fills_the_tail_of_a_step_and_strict_steps_add_up():
    workload = Workload(num_fragments=8, num_slots=2, num_steps=3)
    strict, early = simulate(workload, COSTS, {"gap"}), simulate(workload, COSTS, {"gap", "tcss"})
    assert strict.makespan_s == pytest.approx(3 * 4.8)
    assert all(report.stale_groups == {0: 8} for report in strict.reports)
    # generation never pauses: 24 chunks on 2 slots, then the last wave's training and commit
    assert early.makespan_s == pytest.approx(12 + 0.1 + 2 * 0.2 + 0.3)
    assert [report.stale_groups for report in early.reports] == [{0: 8}, {0: 6, 1: 2}, {0: 6, 1: 2}]


def random_case(rng: random.Random) -> tuple[Workload, Costs]:
    workload = Workload(
        num_fragments=rng.randint(1, 14),
        num_slots=rng.randint(1, 5),
        num_steps=rng.randint(1, 4),
        stale_fraction=rng.choice([0.25, 0.5, 1.0]),
    )
    costs = Costs(
        generate_s=rng.choice([0.0, 1.0]),
        assist_s=rng.uniform(0.1, 3),
        score_s=rng.choice([0.0, 0.1, 1.0]),
        train_s=rng.uniform(0.01, 1.5),
        commit_s=rng.choice([0.0, 0.3, 1.0]),
    )
    return workload, costs


def assert_invariants(workload: Workload, costs: Costs, techniques: set[str]) -> None:
    result = simulate(workload, costs, techniques)
    num_groups = workload.num_fragments * workload.num_steps
    count = Counter((event.what, number) for event in result.events for number in event.ids)
    for group in range(num_groups):
        assert count["generate", group] + count["assist", group] == 1, "each chunk is generated once"
        assert count["score", group] == count["train", group] == 1
    assert sum(event.what == "commit" for event in result.events) == workload.num_steps
    # no pool does two things at once, and all idle time is counted
    busy_s = Counter()
    for who in {event.who for event in result.events} - {"scorer"}:
        spans = [(event.start_s, event.end_s) for event in result.events if event.who == who]
        for (_, end_s), (start_s, _) in pairwise(spans):
            assert start_s >= end_s - 1e-6
        busy_s["trainer" if who == "trainer" else "generator"] += sum(end - start for start, end in spans)
    assert result.bubble_s["trainer"] == pytest.approx(result.makespan_s - busy_s["trainer"], abs=1e-6)
    assert result.bubble_s["generator"] == pytest.approx(
        workload.num_slots * result.makespan_s - busy_s["generator"], abs=1e-6
    )
    # a fragment trains after its score, its commit after all training
    scored_s = {event.ids[0]: event.end_s for event in result.events if event.what == "score"}
    committed_s = {event.ids[0]: event.start_s for event in result.events if event.what == "commit"}
    for event in result.events:
        if event.what == "train":
            assert all(event.start_s >= scored_s[number] - 1e-6 for number in event.ids)
            assert event.end_s <= committed_s[event.ids[0] // workload.num_fragments] + 1e-6
        assert event.end_s <= result.makespan_s + 1e-6
    if "tcss" not in techniques:
        assert all(set(report.stale_groups) == {0} for report in result.reports)
    if "tag" not in techniques:
        assert not any(event.what == "assist" for event in result.events)


def test_invariants_hold_for_all_techniques():
    rng = random.Random(2)
    for _ in range(60):
        workload, costs = random_case(rng)
        for techniques in (set(), {"gap"}, {"tag"}, {"gap", "tag"}, {"gap", "tcss"}, {"gap", "tag", "tcss"}, {"tcss"}):
            assert_invariants(workload, costs, techniques)


def test_no_technique_makes_a_run_longer():
    rng = random.Random(4)
    gained = Counter()
    for _ in range(80):
        workload, costs = random_case(rng)
        for fewer, more in (
            (set(), {"gap"}),
            (set(), {"tag"}),
            ({"gap"}, {"gap", "tag"}),
            ({"gap"}, {"gap", "tcss"}),
            ({"gap", "tcss"}, {"gap", "tag", "tcss"}),
            ({"gap", "tag"}, {"gap", "tag", "tcss"}),
        ):
            slow = simulate(workload, costs, fewer).makespan_s
            fast = simulate(workload, costs, more).makespan_s
            assert fast <= slow + 1e-6, (workload, costs, more)
            gained[tuple(sorted(more))] += fast < slow - 1e-6
    assert min(gained.values()) > 10


def test_schedulers_import_the_standard_library_only():
    for path in Path(verl_digen.schedulers.__file__).parent.glob("*.py"):
        for name in re.findall(r"(?m)^ *(?:from|import) ([\w.]+)(?: import .*)?$", path.read_text()):
            is_own = name.startswith("verl_digen.schedulers") or name == "verl_digen.require"
            assert is_own or name.partition(".")[0] in sys.stdlib_module_names, f"{path.name} imports {name}"
