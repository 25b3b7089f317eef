# SPDX-License-Identifier: Apache-2.0
"""The verdicts on a run: recorded runs that learned are green, and each rule turns red on a run with its fault."""

import json
import logging
from math import inf, nan

import pytest
from omegaconf import OmegaConf

from tests.docs.blocks import ROOT
from verl_digen.config import DigenConfig
from verl_digen.observe.health import LEAST, RULES, Health, Verdict, gap_metrics
from verl_digen.observe.run_files import METRICS, WARNINGS, read_lines
from verl_digen.trainer.run_output import RunOutput

GOOD = {
    "reward/mean": 0.5,
    "reward/std": 0.2,
    "reward/zero_spread_fraction": 0.0,
    "rollout/log_prob_gap_to_bound": 1e-4,
    "actor/grad_norm": 0.01,
    "actor/grad_rms_to_eps": 900.0,
    "actor/clip_fraction": 0.1,
    "rollout/num_restarts": 0.0,
    "rollout/refilled_groups": 0.0,
    "perf/images_per_s": 10.0,
    **{"perf/overhead_s": 1.0, "perf/generate_s": 2.0, "perf/train_s": 3.0, "perf/step_s": 6.0},
    **{"hacking/warning": 0.0, "hacking/verdict": 0.0},
}
NO_REWARD = {"reward": {"custom_reward_function": {"path": None}}}
RISING = [0.50, 0.56, 0.61, 0.62, 0.66, 0.69, 0.70, 0.72]


def judged(rows) -> dict[str, Verdict]:
    health = Health()
    for row in rows:
        health.observe(row)
    return {verdict.rule.name: verdict for verdict in health.verdicts()}


def steps(count: int, **changed: float) -> list[dict[str, float]]:
    return [{**GOOD, **{name.replace("__", "/"): value for name, value in changed.items()}} for _ in range(count)]


def validations(values) -> list[dict[str, float]]:
    return [{"val/reward": value} for value in values]


def test_a_healthy_run_is_green_from_its_first_judged_step_to_its_last():
    rows = [row | validated for row, validated in zip(steps(8), validations(RISING), strict=True)]
    for count in range(1, len(rows) + 1):
        assert {verdict.level for verdict in judged(rows[:count]).values()} <= {"green", "unknown"}
    assert {verdict.level for verdict in judged(rows + steps(60)).values()} == {"green"}


def test_the_recorded_run_of_every_algorithm_ends_green_and_is_never_red():
    num_runs, num_amber = 0, 0
    curves = json.loads((ROOT / "docs" / "algorithms" / "learning.json").read_text())["curves"]
    for run in (run for curve in curves for run in curve["runs"].values()):
        values = [value for _, value in run["val"]]
        found = [
            {verdict.level for verdict in judged(validations(values[:count])).values()} - {"unknown"}
            for count in range(len(values) + 1)
        ]
        assert found[-1] == {"green"} and "red" not in set().union(*found)
        num_runs, num_amber = num_runs + 1, num_amber + ("amber" in set().union(*found))
    assert (num_runs, num_amber) == (42, 1), "one that had not risen after 15 and 20 steps"


CASES = [
    ("Validation reward rises", validations([0.7, 0.66, 0.61, 0.6, 0.55, 0.5]), "red"),
    ("Validation reward rises", validations([0.5, nan]), "red"),
    ("Validation reward rises", validations([0.5, 0.52, 0.49, 0.51, 0.5, 0.5]), "amber"),
    ("Validation reward rises", validations([0.5, *[nan] * 9, 0.6]), "unknown"),
    ("Validation reward holds", validations([*RISING, 0.6, 0.5, 0.4, 0.3]), "red"),
    ("Validation reward holds", validations([1.0] * 8), "green"),  # at its maximum
    ("Spread of the rewards", steps(10) + steps(5, reward__std=1e-4), "red"),
    ("Groups without spread", steps(LEAST, reward__zero_spread_fraction=0.95), "red"),
    ("What was sampled is trained", steps(LEAST, rollout__log_prob_gap_to_bound=nan), "red"),
    ("Gradient", steps(LEAST, actor__grad_norm=0.0), "red"),
    ("Gradient", steps(LEAST, actor__grad_norm=inf), "red"),
    ("Gradient", steps(4, actor__grad_norm=inf) + steps(1), "green"),  # fp16 finds its loss scale
    ("Gradient", steps(40) + steps(10, actor__grad_norm=0.06), "amber"),
    ("Gradient", steps(40) + steps(10, actor__grad_norm=0.6), "red"),
    ("Gradient against Adam's eps", steps(LEAST, actor__grad_rms_to_eps=9.0), "red"),
    ("Clipped ratios", steps(LEAST, actor__clip_fraction=0.95), "red"),
    ("Failures", steps(3, rollout__refilled_groups=2.0), "red"),
    ("Failures", steps(3) + steps(1, rollout__num_restarts=1.0), "amber"),
    ("Failures", steps(30, rollout__num_restarts=1.0), "green"),  # long ago
    ("Overhead", steps(LEAST, perf__overhead_s=5.0), "red"),
    ("Reward hacking", steps(1, hacking__warning=1.0, hacking__verdict=1.0), "red"),
    ("Reward hacking", steps(1, hacking__warning=1.0), "amber"),
]


@pytest.mark.parametrize(("name", "rows", "level"), CASES)
def test_a_fault_colours_the_rule_of_its_metric_alone(name, rows, level):
    found = judged(rows)
    assert found[name].level == level
    reds = {verdict.rule.metric for verdict in found.values() if verdict.level == "red"}
    assert reds == ({found[name].rule.metric} if level == "red" else set())


def test_each_rule_can_turn_red():
    assert {name for name, _, level in CASES if level == "red"} == {rule.name for rule in RULES}


def test_what_was_not_recorded_is_unknown_and_says_when_it_will_be():
    found = judged([])
    assert {verdict.level for verdict in found.values()} == {"unknown"}
    assert found["Reward hacking"].text == "measured with a gold reward"


def test_the_gap_counts_against_the_clip_range_that_sees_it_and_not_with_older_samples():
    row = {"rollout/log_prob_gap_mean": 1e-4, "rollout/version_age_max_versions": 0.0}
    assert gap_metrics(row, 1e-4) == {"rollout/log_prob_gap_to_bound": pytest.approx(3.0)}
    assert gap_metrics(row, None)["rollout/log_prob_gap_to_bound"] < 0.1
    assert gap_metrics(row | {"rollout/version_age_max_versions": 1.0}, 1e-4) == gap_metrics({}, 1e-4) == {}


def test_a_run_warns_once_of_what_turned_red_also_after_a_resume(tmp_path, caplog):
    config = OmegaConf.create({"data": {"train_batch_size": 4}, "trainer": {"logger": []}, **NO_REWARD})
    rows = steps(4) + steps(7, actor__grad_rms_to_eps=1.0)

    def told(first: int, last: int) -> list[str]:
        caplog.clear()
        output = RunOutput(config, DigenConfig(report=False, num_logged_groups=0), tmp_path)
        output.keep_until(first)
        for step in range(first + 1, last + 1):
            output.on_step(step, rows[step - 1], {}, None, num_steps=11, remaining_s=0.0)
        output.finish()
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    [text] = told(0, 9)
    assert text.startswith("health: actor/grad_rms_to_eps is 1 (1 x eps). Adam's eps shortens the steps")
    assert text.endswith("eps=1e-15. (docs/numerics.md#metrics)")
    assert told(9, 11) == [], "said before the resume"
    assert [line["step"] for line in read_lines(tmp_path / WARNINGS)] == [9]
    assert {"step", "at_s"} < read_lines(tmp_path / METRICS)[0].keys()
