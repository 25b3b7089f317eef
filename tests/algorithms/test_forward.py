# SPDX-License-Identifier: Apache-2.0
"""Noise levels of forward points: where they lie, how many there are, and what is refused."""

from collections.abc import Mapping
from statistics import NormalDist, fmean
from typing import Any

import pytest
import torch

from verl_digen.algorithms.forward import ForwardConfig, NoiseLevels, draw_noise_levels, point_noise
from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise

SCHEDULE = torch.tensor([1.0, 0.8, 0.5, 0.1, 0.0])
AWM = ForwardConfig("strata", num_points=6, first_step=1, until=0.9)
DGPO = ForwardConfig(num_points=4, until=0.7)
DPO = ForwardConfig("logit_normal", num_points=2)


def drawn(config: ForwardConfig, num_steps: int, count: int = 400) -> list[tuple[float, ...]]:
    return [draw_noise_levels(config, run_seed=3, uid=f"g{n}", num_steps=num_steps).steps for n in range(count)]


def test_a_level_of_a_step_is_its_sigma_and_one_between_steps_lies_between():
    found = NoiseLevels((0, 1, 1.5, 3, 3.75)).sigmas(SCHEDULE)
    torch.testing.assert_close(found, torch.tensor([1.0, 0.8, 0.65, 0.1, 0.025]))
    assert torch.equal(NoiseLevels((0, 2, 3)).sigmas(SCHEDULE), SCHEDULE[[0, 2, 3]])


def test_levels_are_a_function_of_run_and_group():
    for config in (ForwardConfig(), AWM, DGPO, DPO):
        one, again = (draw_noise_levels(config, run_seed=3, uid="g", num_steps=14) for _ in range(2))
        assert one == again and list(one.steps) == sorted({*one.steps})
        assert len({*drawn(config, 14, 40)}) > 10 or config == ForwardConfig()


def test_awm_s_strata_are_those_of_its_code():
    """linspace(1, int(14 x 0.9), 7) in whole numbers: 1 2 4 6 8 10 12."""
    parts = [set(part) for part in zip(*drawn(AWM, 14), strict=True)]
    assert parts == [{1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}, {10, 11}]
    assert all(int(step) == step for step in drawn(AWM, 14, 1)[0])


def test_dgpo_s_levels_are_four_of_the_first_seven_steps():
    found = drawn(DGPO, 10)
    assert {len({*steps}) for steps in found} == {4}
    assert {step for steps in found for step in steps} == set(range(7))


def test_logit_normal_levels_are_normal_in_log_odds():
    shares = [step / 10 for steps in drawn(DPO, 10) for step in steps]
    z = [NormalDist().inv_cdf(0.5) + torch.logit(torch.tensor(share)).item() for share in shares]
    assert abs(fmean(z)) < 0.15 and 0.9 < fmean(value * value for value in z) < 1.1
    assert ForwardConfig("logit_normal", num_points=30).count(10) == 30 and ForwardConfig("logit_normal").count(10) == 9


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "logit_normal", "until": 0.9}, "digen.forward.until must be 1.0 with .*logit_normal.* got 0.9"),
        ({"kind": "logit_normal", "first_step": 1}, "digen.forward.first_step must be 0 with .*logit_normal.* got 1"),
    ],
)
def test_a_bad_setting_is_an_error_that_names_the_key(values: Mapping[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**values)


def test_noise_of_a_point_is_none_that_its_sample_was_generated_with():
    """A solver with noise draws it at each step."""
    generated = torch.stack([step_noise(sample_seed(3, "g0", 1), step, (8,)) for step in (INITIAL_LATENTS, *range(5))])
    for point in range(5):
        assert (generated - point_noise(3, "g0", 1, point, (8,))).abs().amax(dim=1).min() > 0.1


def test_a_schedule_without_enough_steps_is_refused():
    with pytest.raises(ValueError, match=r"num_points must be <= 8, the steps that .* leave of .*num_steps=10, got 9"):
        ForwardConfig("strata", num_points=9, first_step=1, until=0.9).count(10)
    with pytest.raises(ValueError, match=r"first_step must be below digen.forward.until x .*rounded down 4, got 4"):
        ForwardConfig(first_step=4, until=0.9).count(5)
