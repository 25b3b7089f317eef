# SPDX-License-Identifier: Apache-2.0
"""Remarks of a run's first steps: the noise floor against the clip range, gradients against Adam's eps."""

from __future__ import annotations

import math

import pytest

from verl_digen.observe.metrics import training_metrics
from verl_digen.observe.numerics import FirstSteps, Remark

CLIP = {"clip_range": 1e-4, "clip_range_high": 3e-4}


def step(gap: float | None = 1e-6, age: float = 0.0, **more: float) -> dict[str, float]:
    found = {"rollout/version_age_max_versions": age, **more}
    return found if gap is None else found | {"rollout/log_prob_gap_mean": gap, "rollout/log_prob_gap_max": 4 * gap}


def remarks_of(watch: FirstSteps, *steps: dict[str, float]) -> list[Remark]:
    return [remark for metrics in steps for remark in watch.observe(metrics)]


def test_the_noise_floor_is_told_once_after_the_first_steps():
    watch = FirstSteps(CLIP, is_recorded=True)
    assert not remarks_of(watch, step(1e-6), step(2e-6))
    (remark,) = watch.observe(step(3e-6))
    assert remark.text.startswith("noise floor: log-probs of replicas and trainer differ by 2.0e-06 on average and 1.2")
    assert "that is 2 % of digen.loss.clip_range=0.0001" in remark.text and not remark.is_warning
    assert not remarks_of(watch, step(1.0), step(1.0))


@pytest.mark.parametrize(("gap", "warns"), [(3.3e-5, False), (3.4e-5, True), (math.nan, True)])
def test_a_floor_above_a_third_of_the_clip_range_is_warned_of(gap: float, warns: bool):
    (remark,) = FirstSteps(CLIP, is_recorded=True, num_steps=1).observe(step(gap))
    assert remark.is_warning == warns and ("are clipped for rounding alone: set it to" in remark.text) == warns


def test_a_floor_that_the_ratio_does_not_see_is_no_warning():
    (remark,) = FirstSteps(CLIP, is_recorded=False, num_steps=1).observe(step(1.0))
    assert not remark.is_warning and "does not reach the ratio" in remark.text
    (remark,) = FirstSteps({}, is_recorded=True, num_steps=1).observe(step(1.0))
    assert not remark.is_warning and "no clip range" in remark.text


def test_stale_samples_do_not_count_to_the_floor():
    watch = FirstSteps(CLIP, is_recorded=True)
    assert not watch.observe(step(1e-6))
    (remark,) = watch.observe(step(1e-3, age=1.0))
    assert "differ by 1.0e-06 on average" in remark.text
    assert not remarks_of(FirstSteps(CLIP, is_recorded=True), *[step(1e-3, age=1.0)] * 4)
    assert not remarks_of(FirstSteps(CLIP, is_recorded=True), *[step(None)] * 4)  # forward points


@pytest.mark.parametrize(("ratio", "warns"), [(10.0, False), (0.5, True)])
def test_gradients_that_are_small_against_eps_are_warned_of(ratio: float, warns: bool):
    sizes = {"actor/grad_rms_to_eps": ratio, "actor/grad_rms": ratio * 1e-8, "actor/eps_bound_share": 0.75}
    found = remarks_of(FirstSteps({}, is_recorded=False), *[step(None, **sizes)] * 6)
    assert [remark.is_warning for remark in found] == [True] * warns
    if warns:
        assert "RMS of 5.0e-09, 0.5 times eps, and eps holds back 75 % of the trained parameters" in found[0].text


def test_signs_of_log_ratios_are_means_over_rows_of_one_sign_of_the_advantage():
    sums = {"ratio_sign_positive": 0.2, "advantage_positive_fraction": 0.4}
    none = {"ratio_sign_negative": 0.0, "advantage_negative_fraction": 0.0}
    found = training_metrics(sums | none)
    assert found["actor/ratio_sign_positive"] == pytest.approx(0.5) and found["actor/ratio_sign_negative"] == 0.0
