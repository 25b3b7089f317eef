# SPDX-License-Identifier: Apache-2.0
"""Cheap steps outside the window: refused before Ray starts where something else would skip them, too."""

from __future__ import annotations

import pytest

from verl_digen import preflight
from verl_digen.preflight.pools import check_outside
from verl_digen.preflight.start_config import StartConfig

KEY = "digen.sampling.outside"
WINDOW = "digen.window={kind: consecutive, size: 2, range: [0, 3]}"
STEPS = "digen.sampling.num_steps=10"
CACHE, PASSED, FP8 = f"{KEY}.cache=0.1", f"{KEY}.solver_after=0.5", f"{KEY}.fp8=true"
SEPARATE = "recipe=digen_flowgrpo+disaggregated"
TOGETHER = "recipe=digen_flowgrpo"


def test_a_run_with_steps_outside_its_window_passes(start, runnable):
    preflight.check(start(*runnable, WINDOW, STEPS, CACHE, PASSED, FP8))


def test_every_step_in_the_window_is_refused_with_key_rule_value_and_remedy(start, runnable):
    with pytest.raises(ValueError) as error:
        preflight.check(start(*runnable, STEPS, CACHE))
    assert (
        f"{KEY}.cache must be left out with digen.window.kind=all, whose window is every step but the last, so that "
        "none is outside, got 0.1; set digen.window.kind=consecutive"
    ) in str(error.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (SEPARATE, CACHE, "digen.tag.policy=bts"),
            rf"{KEY}\.cache must be 0 with digen\.tag\.policy=bts: .*got 0\.1; set",
        ),
        ((SEPARATE, PASSED, "actor_rollout_ref.rollout.name=vllm_omni"), rf"{KEY} must be left out with .*=vllm_omni"),
        (
            (SEPARATE, CACHE, "actor_rollout_ref.rollout.name=vllm_omni"),
            r"evaluate the network at every step .*; set act",
        ),
        ((SEPARATE, FP8, "actor_rollout_ref.rollout.name=vllm_omni"), rf"{KEY} must be left out with .*=vllm_omni"),
        ((SEPARATE, FP8, "digen.tag.policy=bts"), rf"{KEY}\.fp8 must be false with digen\.tag\.policy=bts: .*; set it"),
        ((TOGETHER, FP8, "digen.compile=true"), rf"{KEY}\.fp8 must be false with compiled.*rollout\.compile=false"),
    ],
)
def test_other_back_ends_and_trainers_that_assist_are_refused(start, words, message):
    with pytest.raises(ValueError, match=message):
        check_outside(StartConfig(start(*words, WINDOW, STEPS)))


def test_trainers_that_assist_may_pass_over_steps_and_stale_samples_may_be_cheap(start):
    check_outside(StartConfig(start(SEPARATE, PASSED, WINDOW, STEPS, "digen.tag.policy=always")))
    check_outside(StartConfig(start(SEPARATE, CACHE, WINDOW, STEPS, "digen.staleness.max_versions=1")))
    check_outside(StartConfig(start(TOGETHER, FP8, WINDOW, STEPS, "digen.compile=true", "digen.rollout.compile=false")))
    omni = "actor_rollout_ref.rollout.name=vllm_omni"
    check_outside(StartConfig(start(SEPARATE, WINDOW, STEPS, omni, "digen.tag.policy=bts")))
