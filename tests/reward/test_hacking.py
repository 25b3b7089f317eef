# SPDX-License-Identifier: Apache-2.0
"""The alarm for a hacked reward: when it sounds, and when it does not."""

import math

import pytest

from verl_digen.reward.hacking import Finding, Point, Rules, best, judge, trend

RISING = [0.50, 0.53, 0.55, 0.59, 0.60, 0.64, 0.66, 0.70, 0.72, 0.75]
FALLING = [0.80, 0.79, 0.76, 0.75, 0.71, 0.70, 0.66, 0.65, 0.62, 0.60]
FLAT = [0.70, 0.71, 0.70, 0.69, 0.70, 0.71, 0.69, 0.70, 0.71, 0.70]


def findings(rewards, golds) -> list[Finding]:
    """Findings after each validation, every 10 steps."""
    rows = enumerate(zip(rewards, golds, strict=True), start=1)
    points = [Point(10 * number, reward, {"pick": gold}) for number, (reward, gold) in rows]
    return [judge(points[:end]) for end in range(1, len(points) + 1)]


def test_a_gold_reward_that_falls_while_the_reward_rises_warns_and_then_stops():
    found = findings(RISING, FALLING)
    verdicts = [finding.verdict for finding in found]
    assert verdicts == ["too_few"] * 5 + ["warning"] * 2 + ["hacking"] * 3
    assert found[5].falling == ("pick",) and found[5].reward_trend > 3 and found[5].gold_trends["pick"] < -3


@pytest.mark.parametrize(
    ("rewards", "golds"),
    [
        pytest.param(RISING, RISING, id="both rise"),
        pytest.param(FALLING, FALLING, id="both fall"),
        pytest.param(FLAT, FALLING, id="the reward is flat"),
        pytest.param(RISING, FLAT, id="the gold reward is flat"),
        pytest.param(FALLING, RISING, id="the other way round"),
    ],
)
def test_anything_else_is_fine(rewards, golds):
    assert {finding.verdict for finding in findings(rewards, golds)} == {"too_few", "fine"}


@pytest.mark.parametrize("place", range(10))
def test_one_outlier_raises_no_alarm_and_hides_none(place):
    golds = list(FLAT)
    golds[place] = 0.1
    assert not any(finding.falling for finding in findings(RISING, golds))
    low, high = list(FALLING), list(FALLING)
    low[place], high[place] = low[place] - 0.05, high[place] + 0.05
    assert findings(RISING, low)[-1].falling and findings(RISING, high)[-1].falling


def test_the_trend_is_the_median_slope_in_standard_errors():
    slope = (0.1 + 1.0) / 2  # of 0.1, 0.1, 0.1, 1.0, 1.45, 2.8
    sigma = 10 * math.sqrt(math.pi) / 2  # neighbours differ by 1, 1, 28
    assert trend([0, 10, 20, 30], [0.0, 1.0, 2.0, 30.0]) == pytest.approx(slope * math.sqrt(500) / sigma)
    line = trend(range(6), [3.0 * step for step in range(6)])
    assert line == pytest.approx(math.sqrt(17.5) / (math.sqrt(math.pi) / 2)) and round(line, 1) == 4.7
    assert trend(range(10), [-step for step in range(10)]) == pytest.approx(-10.25, abs=0.01)
    assert trend([1, 2, 3], [5.0, 5.0, 5.0]) == 0.0


def test_the_best_is_the_first_highest_of_all_and_the_window_ends_with_the_newest():
    points = [Point(step, 0.5, {"pick": gold}) for step, gold in enumerate([0.1, 0.9, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1])]
    assert best(points, "pick") is points[1]
    assert judge(points, Rules(window=6)) == judge(points[2:], Rules(window=6)) != judge(points, Rules(window=7))


def test_several_gold_rewards_are_judged_each():
    golds = [{"falls": falls, "flat": flat} for falls, flat in zip(FALLING, FLAT, strict=True)]
    finding = judge([Point(step, RISING[step], golds[step]) for step in range(10)])
    assert finding.falling == ("falls",) and set(finding.gold_trends) == {"falls", "flat"}
