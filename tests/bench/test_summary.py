# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios and agreement, against numbers worked out by hand."""

import json
import random

import pytest

from tests.bench.cases import finished_run
from verl_digen.tools.bench.summary import best_baseline, summarise, table, to_json

POOLS = {"perf/bubble_fraction/trainer": 0.25, "perf/bubble_fraction/generator": 0.5, "perf/overlap_s": 0.5}
RUNS = (
    finished_run("barrier", 0, [9.0, 2.0, 2.2, 2.4], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
    finished_run("gap", 0, [9.0, 1.0, 1.1, 1.2], gradients=[1.0, 2.0, 3.0, 4.004], extra=POOLS),
    finished_run("barrier", 1, [9.0, 4.0, 4.4, 4.8], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
    finished_run("gap", 1, [9.0, 2.0, 2.2, 2.4], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
)


def test_medians_leave_the_warm_up_out_and_ratios_are_made_repeat_by_repeat():
    barrier, gap = summarise(RUNS, num_warm_up=1, num_devices=2)
    assert (barrier.mode, barrier.num_runs, barrier.num_steps) == ("barrier", 2, 6)
    assert barrier.step_s == pytest.approx((2.4 + 4.0) / 2)
    assert barrier.spread_s == (2.2, 4.4)
    assert gap.step_s == pytest.approx((1.2 + 2.0) / 2)
    # the second repeat was made on a machine half as fast: no ratio notices
    assert gap.speedup == {"barrier": pytest.approx(2.0)}
    assert barrier.speedup == {"barrier": 1.0}
    assert gap.images_per_s == pytest.approx((10 / 1.2 + 10 / 2.0) / 2)
    assert gap.images_per_s_per_device == pytest.approx(gap.images_per_s / 2)
    assert gap.bubbles == {"trainer": 0.25, "generator": 0.5}
    assert gap.overlap == pytest.approx((0.5 / 1.2 + 0.5 / 2.0) / 2)
    assert gap.final_reward == 0.53


def test_agreement_is_the_largest_relative_difference_of_any_step_to_the_first_run():
    barrier, gap = summarise(RUNS, num_warm_up=1, num_devices=2)
    assert barrier.max_gradient_gap == 0.0
    assert gap.max_gradient_gap == pytest.approx(0.001)
    untrained = summarise([finished_run("gap", 0, [1.0, 1.0])], num_warm_up=1, num_devices=2)
    assert untrained[0].max_gradient_gap is None


def test_gradients_of_equal_norms_that_point_elsewhere_do_not_agree():
    norms = [2.0, 4.0]
    for projections, gap in (([1.0, -2.0], 1.0), ([1.0, 2.2], 0.05), ([1.0, 2.0], 0.0)):
        runs = (
            finished_run("barrier", 0, [1.0, 1.0], gradients=norms, projections=[1.0, 2.0]),
            finished_run("gap", 0, [1.0, 1.0], gradients=norms, projections=projections),
        )
        found = summarise(runs, num_warm_up=1, num_devices=2)[1].max_gradient_gap
        assert found == pytest.approx(gap)


def test_the_order_of_the_runs_within_a_repeat_decides_no_number():
    expected = {summary.mode: summary for summary in summarise(RUNS, num_warm_up=1, num_devices=2)}
    rng = random.Random(0)
    for _ in range(10):
        shuffled = [*RUNS[:1], *rng.sample(RUNS[1:], 3)]
        got = summarise(shuffled, num_warm_up=1, num_devices=2)
        assert {summary.mode: summary for summary in got} == expected


def rows_of(text: str) -> list[str]:
    """Header and rows of a table, without the lines above that describe it."""
    lines = text.splitlines()
    return lines[lines.index("") + 1 :]


def test_the_table_has_a_dash_where_a_mode_has_no_such_number():
    runs = (
        finished_run("colocated", 0, [3.0, 2.0]),
        finished_run("gap", 0, [3.0, 1.0], extra={**POOLS, "bts/prediction_error": -0.04}),
    )
    lines = rows_of(table(summarise(runs, num_warm_up=1, num_devices=2)))
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert " ".join(lines[1].split()) == "colocated 2.000 (2.000..2.000) 5.00 2.500 1.00 0.0% - - - 0.510 - -"
    assert " ".join(lines[2].split()) == "gap 1.000 (1.000..1.000) 10.00 5.000 2.00 0.0% 25.0% 50.0% 50.0% 0.510 - 4.0%"


def test_modes_are_compared_with_the_fastest_run_that_overlaps_nothing():
    runs = [
        finished_run(mode, 0, [9.0, step_s])
        for mode, step_s in (("colocated", 4.0), ("colocated+tsp", 2.0), ("barrier", 5.0), ("gap", 1.0))
    ]
    summaries = summarise(runs, num_warm_up=1, num_devices=2)
    assert best_baseline(summaries) == "colocated+tsp"
    text = table(summaries)
    assert "best baseline: colocated+tsp; x best" in text
    assert [line.split()[5] for line in rows_of(text)[1:]] == ["0.50", "1.00", "0.40", "2.00"]
    assert best_baseline(summarise(runs[3:], num_warm_up=1, num_devices=2)) is None


def test_stale_samples_stand_beside_strict_ones():
    stale = {
        "staleness/samples_0_versions": 6.0,
        "staleness/samples_1_versions": 3.0,
        "staleness/samples_2_versions": 1.0,
    }
    runs = (finished_run("gap", 0, [1.0, 1.0]), finished_run("gap+tsp+tag+tcss", 0, [1.0, 1.0], extra=stale))
    strict, with_stale = summarise(runs, num_warm_up=1, num_devices=2)
    assert (strict.stale, with_stale.stale) == (0.0, 0.4)
    assert [line.split()[6] for line in rows_of(table([strict, with_stale]))[1:]] == ["0.0%", "40.0%"]


def test_the_json_holds_the_setting_the_summary_and_every_step():
    summaries = summarise(RUNS, num_warm_up=1, num_devices=2)
    data = json.loads(json.dumps(to_json(summaries, RUNS, {"a": 1})))
    assert data["setting"] == {"a": 1}
    assert [mode["mode"] for mode in data["modes"]] == ["barrier", "gap"]
    assert [len(run["steps"]) for run in data["runs"]] == [4, 4, 4, 4]
    assert data["runs"][3]["repeat"] == 2 and data["runs"][3]["steps"][3]["perf/step_s"] == 2.4
