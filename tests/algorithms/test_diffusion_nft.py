# SPDX-License-Identifier: Apache-2.0
"""DiffusionNFT's loss against values of its published code; its formula is in test_forward_losses.py."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.objectives import default_config, find_objective, policy_loss
from verl_digen.algorithms.objectives.diffusion_nft import optimality
from verl_digen.algorithms.rows import numbers

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracles" / "loss_diffusion_nft.npz"
CONFIG = default_config("diffusion_nft")


def test_loss_and_gradient_agree_with_diffusion_nft():
    oracle = {name: torch.from_numpy(np.asarray(value)) for name, value in np.load(ORACLE).items()}
    velocity = oracle["v_new"].requires_grad_()
    inputs = {
        "advantage": oracle["advantages"],
        "sigma": oracle["timesteps"] / 1000,
        "clean": oracle["x0"],
        "noisy": oracle["beta1.0_xt"],
        "velocity": velocity,
        "old_velocity": oracle["v_old"],
    }
    output = policy_loss("diffusion_nft", inputs, replace(CONFIG, kl_coef=0.0))
    (gradient,) = torch.autograd.grad(output.loss, velocity)
    torch.testing.assert_close(output.loss.double(), oracle["beta1.0_loss"].double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient, oracle["beta1.0_dloss_dv"], rtol=1e-4, atol=1e-7)
    metrics = numbers(output.metrics)
    assert metrics["positive_error"] == pytest.approx(oracle["beta1.0_positive_loss"].mean().item(), rel=1e-6)
    assert metrics["negative_error"] == pytest.approx(oracle["beta1.0_negative_loss"].mean().item(), rel=1e-6)
    assert metrics["optimality"] == pytest.approx(oracle["beta1.0_r"].mean().item(), rel=1e-6)
    weighed = policy_loss(
        "diffusion_nft", inputs | {"reference_velocity": oracle["v_ref"]}, replace(CONFIG, kl_coef=1.0)
    )
    kl = oracle["beta1.0_kl_div_loss"].item()
    assert (weighed.loss - output.loss).item() == pytest.approx(kl, rel=1e-4)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("all", [0.0, 0.3, 0.5, 0.65, 1.0]),
        ("positive_only", [0.5, 0.5, 0.5, 0.65, 1.0]),
        ("negative_only", [0.0, 0.3, 0.5, 0.5, 0.5]),
        ("one_only", [0.5, 0.5, 0.5, 0.6, 0.6]),
        ("binary", [0.4, 0.4, 0.5, 0.6, 0.6]),
    ],
)
def test_a_mode_says_which_advantages_count(mode: str, expected: list[float]):
    advantages = torch.tensor([-5.0, -2.0, 0.0, 1.5, 5.0])
    torch.testing.assert_close(optimality(advantages, replace(CONFIG, mode=mode)), torch.tensor(expected))


@pytest.mark.parametrize(
    ("old_policy", "decays"),
    [
        ("copy", {0: 0.0, 100: 0.0}),
        ("linear", {0: 0.0, 100: 0.1, 500: 0.5, 9000: 0.5}),
        ("delayed", {0: 0.0, 75: 0.0, 76: 0.0075, 175: 0.75, 9000: 0.999}),
    ],
)
def test_the_old_policy_follows_by_its_schedule(old_policy: str, decays: dict[int, float]):
    decay = replace(CONFIG, old_policy=old_policy).copies["old"]
    assert {k: decay.at(k) for k in decays} == pytest.approx(decays)
    assert Decay(0.5, 0.9, start=2).at(3) == 0.5


def test_it_serves_the_old_policy_and_reads_the_reference_only_for_its_kl():
    objective = find_objective("diffusion_nft")
    assert (objective.points, objective.behaviour) == ("forward", "old")
    assert not objective.reads_old_weights(CONFIG)
    assert "reference_velocity" in objective.inputs_for(CONFIG)
    assert "reference_velocity" not in objective.inputs_for(replace(CONFIG, kl_coef=0.0))
