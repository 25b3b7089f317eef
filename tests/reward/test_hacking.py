# SPDX-License-Identifier: Apache-2.0
"""The alarm for a hacked reward: when it sounds, when it does not, and that it forgets and remembers what it should."""

import json
import math

import pytest

from verl_digen.reward.hacking import Best, Finding, HackingAlarm, Rules, trend

RISING = [0.50, 0.53, 0.55, 0.59, 0.60, 0.64, 0.66, 0.70, 0.72, 0.75]
FALLING = [0.80, 0.79, 0.76, 0.75, 0.71, 0.70, 0.66, 0.65, 0.62, 0.60]
FLAT = [0.70, 0.71, 0.70, 0.69, 0.70, 0.71, 0.69, 0.70, 0.71, 0.70]


def judge(rewards, golds, alarm=None, first=10) -> list[Finding]:
    """Findings after each validation, every 10 steps."""
    alarm = alarm or HackingAlarm(["pick"])
    return [
        alarm.observe(first + 10 * number, reward=reward, golds={"pick": gold})
        for number, (reward, gold) in enumerate(zip(rewards, golds, strict=True))
    ]


def test_a_gold_reward_that_falls_while_the_reward_rises_warns_and_then_stops():
    found = judge(RISING, FALLING)
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
    assert {finding.verdict for finding in judge(rewards, golds)} == {"too_few", "fine"}


@pytest.mark.parametrize("place", range(10))
def test_one_outlier_raises_no_alarm_and_hides_none(place):
    golds = list(FLAT)
    golds[place] = 0.1
    assert not any(finding.falling for finding in judge(RISING, golds))
    low, high = list(FALLING), list(FALLING)
    low[place], high[place] = low[place] - 0.05, high[place] + 0.05
    assert judge(RISING, low)[-1].falling and judge(RISING, high)[-1].falling


def test_the_trend_is_the_median_slope_in_standard_errors():
    slope = (0.1 + 1.0) / 2  # of 0.1, 0.1, 0.1, 1.0, 1.45, 2.8
    sigma = 10 * math.sqrt(math.pi) / 2  # neighbours differ by 1, 1, 28
    assert trend([0, 10, 20, 30], [0.0, 1.0, 2.0, 30.0]) == pytest.approx(slope * math.sqrt(500) / sigma)
    line = trend(range(6), [3.0 * step for step in range(6)])
    assert line == pytest.approx(math.sqrt(17.5) / (math.sqrt(math.pi) / 2)) and round(line, 1) == 4.7
    assert trend(range(10), [-step for step in range(10)]) == pytest.approx(-10.25, abs=0.01)
    assert trend([1, 2, 3], [5.0, 5.0, 5.0]) == 0.0


def test_the_best_is_the_first_highest_also_when_it_left_the_window():
    alarm = HackingAlarm(["pick"], Rules(window=6))
    judge([0.5] * 9, [0.1, 0.9, 0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1], alarm)
    assert alarm.best == {"pick": Best(20, 0.9)}
    assert [point["step"] for point in alarm.state()["points"]] == [40, 50, 60, 70, 80, 90]


def test_a_step_that_is_observed_again_counts_once_and_an_earlier_one_is_refused():
    once, twice = (HackingAlarm(["pick"]) for _ in range(2))
    judge(RISING[:7], FALLING[:7], once)
    judge(RISING[:7], FALLING[:7], twice)
    again = twice.observe(70, reward=RISING[6], golds={"pick": FALLING[6]})
    assert twice.state() == once.state() and again.verdict == "warning"
    with pytest.raises(RuntimeError, match="in order, got 60 after 70"):
        twice.observe(60, reward=0.0, golds={"pick": 0.0})
    with pytest.raises(RuntimeError, match=r"got none of \['pick'\]"):
        twice.observe(80, reward=0.0, golds={"other": 0.0})


def test_several_gold_rewards_are_judged_each():
    alarm = HackingAlarm(["falls", "flat"])
    for number, reward in enumerate(RISING):
        finding = alarm.observe(number, reward=reward, golds={"falls": FALLING[number], "flat": FLAT[number]})
    assert finding.falling == ("falls",) and set(finding.gold_trends) == {"falls", "flat"}


@pytest.mark.parametrize("cut", (1, 6, 9))
def test_a_resumed_alarm_judges_as_one_that_went_on(cut):
    whole = judge(RISING, FALLING)
    first = HackingAlarm(["pick"])
    judge(RISING[:cut], FALLING[:cut], first)
    second = HackingAlarm(["pick"])
    second.load(json.loads(json.dumps(first.state())))
    assert judge(RISING[cut:], FALLING[cut:], second, first=10 + 10 * cut) == whole[cut:]
    assert second.best == {"pick": Best(10, 0.8)}


def test_a_state_of_other_gold_rewards_starts_anew():
    old = HackingAlarm(["pick"])
    judge(RISING, FALLING, old)
    new = HackingAlarm(["clip"])
    new.load(old.state())
    assert new.best == {} and new.observe(110, reward=1.0, golds={"clip": 1.0}).verdict == "too_few"
