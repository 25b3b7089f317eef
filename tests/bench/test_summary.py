# SPDX-License-Identifier: Apache-2.0
"""Medians, ratios and agreement, against numbers worked out by hand."""

import json
import random

import pytest

from tests.bench.cases import finished_run
from verl_digen.bench.summary import Prediction, summarise, table, to_json

POOLS = {"perf/bubble_fraction/trainer": 0.25, "perf/bubble_fraction/generator": 0.5, "perf/overlap_s": 0.5}
RUNS = (
    finished_run("barrier", 0, [9.0, 2.0, 2.2, 2.4], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
    finished_run("gap", 0, [9.0, 1.0, 1.1, 1.2], gradients=[1.0, 2.0, 3.0, 4.004], extra=POOLS),
    finished_run("barrier", 1, [9.0, 4.0, 4.4, 4.8], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
    finished_run("gap", 1, [9.0, 2.0, 2.2, 2.4], gradients=[1.0, 2.0, 3.0, 4.0], extra=POOLS),
)


def test_medians_leave_the_warm_up_out_and_ratios_are_made_repeat_by_repeat():
    barrier, gap = summarise(RUNS, num_warm_up=1, num_devices=2, predictions={})
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
    barrier, gap = summarise(RUNS, num_warm_up=1, num_devices=2, predictions={})
    assert barrier.max_gradient_gap == 0.0
    assert gap.max_gradient_gap == pytest.approx(0.001)
    untrained = summarise([finished_run("gap", 0, [1.0, 1.0])], num_warm_up=1, num_devices=2, predictions={})
    assert untrained[0].max_gradient_gap is None


def test_the_order_of_the_runs_within_a_repeat_decides_no_number():
    expected = {summary.mode: summary for summary in summarise(RUNS, num_warm_up=1, num_devices=2, predictions={})}
    rng = random.Random(0)
    for _ in range(10):
        shuffled = [*RUNS[:1], *rng.sample(RUNS[1:], 3)]
        got = summarise(shuffled, num_warm_up=1, num_devices=2, predictions={})
        assert {summary.mode: summary for summary in got} == expected


def test_the_table_has_a_dash_where_a_mode_has_no_such_number():
    runs = (finished_run("colocated", 0, [3.0, 2.0]), finished_run("gap", 0, [3.0, 1.0], extra=POOLS))
    lines = table(summarise(runs, num_warm_up=1, num_devices=2, predictions={})).splitlines()
    assert len(lines) == 3 and len({len(line) for line in lines}) == 1
    assert " ".join(lines[1].split()) == "colocated 2.000 (2.000..2.000) 5.00 2.500 - 1.00 - - - 0.510 -"
    assert " ".join(lines[2].split()) == "gap 1.000 (1.000..1.000) 10.00 5.000 - 2.00 25.0% 50.0% 50.0% 0.510 -"


def test_predictions_have_columns_of_their_own():
    predictions = {"barrier": Prediction(2.0, 1.0, None), "gap": Prediction(1.0, 0.88, 2.75)}
    lines = table(summarise(RUNS[:2], num_warm_up=1, num_devices=32, predictions=predictions)).splitlines()
    assert lines[0].split()[-6:] == ["simulated", "off", "by", "bound", "over", "it"]
    assert lines[1].split()[-4:] == ["2.000", "+10.0%", "1.000", "+120.0%"]
    assert lines[2].split()[-4:] == ["1.000", "+10.0%", "0.880", "+25.0%"]
    assert lines[1].split()[6] == "-" and lines[2].split()[6] == "~2.50", "simulated: colocated"


def test_the_planners_own_error_is_shown_where_it_predicted():
    runs = (
        finished_run("gap", 0, [1.0, 1.0, 1.0]),
        finished_run("gap+tsp+tag", 0, [1.0, 1.0, 1.0], extra={"bts/prediction_error": -0.04}),
    )
    lines = table(summarise(runs, num_warm_up=1, num_devices=2, predictions={})).splitlines()
    assert lines[0].split()[-2:] == ["planner", "off"]
    assert (lines[1].split()[-1], lines[2].split()[-1]) == ("-", "4.0%")


def test_the_json_holds_the_setting_the_summary_and_every_step():
    summaries = summarise(RUNS, num_warm_up=1, num_devices=2, predictions={})
    data = json.loads(json.dumps(to_json(summaries, RUNS, {"a": 1})))
    assert data["setting"] == {"a": 1}
    assert [mode["mode"] for mode in data["modes"]] == ["barrier", "gap"]
    assert [len(run["steps"]) for run in data["runs"]] == [4, 4, 4, 4]
    assert data["runs"][3]["repeat"] == 2 and data["runs"][3]["steps"][3]["perf/step_s"] == 2.4
