# SPDX-License-Identifier: Apache-2.0
"""Losses at forward points: values of the published codes, formulas in fp64, joint columns, errors, choices."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.forward_losses import slow_loss
from verl_digen.algorithms.objectives import (
    JointRows,
    LossOutput,
    best_and_worst,
    default_config,
    find_objective,
    policy_loss,
)
from verl_digen.algorithms.objectives.awm import surrogate
from verl_digen.algorithms.objectives.dpo import preferred_pair
from verl_digen.algorithms.rows import LossInputs, numbers

ORACLES = Path(__file__).parents[1] / "fixtures" / "oracles"
LATENTS = ("clean", "noise", "velocity", "old_velocity", "reference_velocity", "ema_velocity")


def oracle_of(name: str) -> dict[str, Any]:
    return dict(np.load(ORACLES / f"loss_{name}.npz"))


def inputs_of(oracle: dict[str, Any], **columns: Any) -> dict[str, Tensor]:
    """Inputs by our names from an oracle's arrays; the velocity needs a gradient."""
    names = {"clean": "x0", "noise": "noise", "velocity": "v", "reference_velocity": "v_ref"}
    names |= {ours: there for ours, there in (("old_velocity", "v_old"), ("ema_velocity", "v_ema")) if there in oracle}
    found = {ours: torch.from_numpy(oracle[there]) for ours, there in names.items()}
    found["velocity"].requires_grad_()
    return found | {name: torch.as_tensor(value) for name, value in columns.items()}


def loss_of(name: str, inputs: dict[str, Tensor], config: Any) -> LossOutput:
    """`policy_loss` of all rows of a batch, with the joint column of the rows' ids."""
    if (joint := find_objective(name).joint) is None:
        return policy_loss(name, inputs, config)
    with torch.no_grad():
        rows = LossInputs.check(name, inputs, columns=("advantage", *joint.columns), latents=joint.latents)
        places, points = torch.arange(len(rows.is_row)), torch.zeros(len(rows.is_row), dtype=torch.int64)
        ids = inputs.get("sample", places), inputs.get("group", places), inputs.get("point", points)
        column = joint.combine(JointRows(joint.scalar(rows), *ids, rows["advantage"]), config)
    return policy_loss(name, inputs | {joint.column: column}, config)


def assert_agrees(loss: Tensor, velocity: Tensor, value: Any, gradient: Any) -> None:
    torch.testing.assert_close(loss.double(), torch.tensor(float(value)).double(), rtol=1e-6, atol=0)
    (found,) = torch.autograd.grad(loss, velocity, retain_graph=True)
    assert (found - torch.from_numpy(gradient)).norm() < 1e-6 * np.linalg.norm(gradient)


def test_awm_agrees_with_its_code():
    oracle = oracle_of("awm")
    inputs = inputs_of(oracle, advantage=oracle["advantages_rows"], sigma=oracle["t"])
    config = default_config("awm")
    assert (config.kl_coef, config.ema_kl_coef, config.weighting, config.power) == (0.003, 1.0, "ghuber", 0.25)
    output = policy_loss("awm", inputs, config)
    assert_agrees(output.loss, inputs["velocity"], oracle["case_recipe_ocr_loss"], oracle["case_recipe_ocr_dloss_dv"])
    metrics = numbers(output.metrics)
    assert metrics["reference_distance"] == pytest.approx(oracle["case_recipe_ocr_kl_loss"], rel=1e-6)
    assert metrics["ema_distance"] == pytest.approx(oracle["case_recipe_ocr_ema_kl_loss"], rel=1e-6)
    assert metrics["ratio_deviation_max"] == pytest.approx(oracle["case_recipe_ocr_ratio"].max() - 1, rel=1e-5)
    rows = LossInputs.check("test", inputs, columns=("sigma",), latents=("clean", "noise", "velocity"))
    for weighting in ("Uniform", "ghuber"):
        found = surrogate(rows, "velocity", replace(config, weighting=weighting))
        torch.testing.assert_close(found, torch.from_numpy(oracle[f"lp_{weighting}"]), rtol=1e-6, atol=0)
        (gradient,) = torch.autograd.grad(found.sum(), inputs["velocity"], retain_graph=True)
        torch.testing.assert_close(gradient, torch.from_numpy(oracle[f"lp_{weighting}_grad"]), rtol=1e-5, atol=1e-8)
    alone = dict(kl_coef=1.0, ema_kl_coef=0.0, advantage_max=1e-30)
    distances = (inputs["velocity"] - inputs["reference_velocity"]).square().flatten(1).mean(1).detach()
    weighed = distances / (2 * torch.from_numpy(oracle["elbo_std"]) ** 2)
    found = policy_loss("awm", inputs, replace(config, kl_weighting="elbo", **alone)).loss
    torch.testing.assert_close(found, weighed.mean(), rtol=1e-5, atol=0)


@pytest.mark.parametrize(("name", "copy"), [("awm", "ema"), ("awm_off_policy", "old")])
def test_awm_s_average_follows_by_its_schedule(name: str, copy: str):
    decays = {
        average: [replace(default_config(name), average=average).copies[copy].at(k) for k in (1, 299, 300, 1000)]
        for average in ("linear", "constant")
    }
    assert decays == {"linear": pytest.approx([0.001, 0.299, 0.3, 0.3]), "constant": [0.3] * 4}


def test_dgpo_agrees_with_its_code():
    oracle = oracle_of("dgpo")
    inputs = inputs_of(oracle, advantage=oracle["advantages"], group=oracle["groups"])
    output = loss_of("dgpo", inputs, default_config("dgpo"))
    kl = (inputs["velocity"] - inputs["reference_velocity"]).square().mean()  # digen.kl
    assert output.loss.item() == pytest.approx(oracle["case_ocr_cfg_dgpo_loss"].item(), rel=1e-6)
    loss = output.loss + 0.02 * kl
    assert_agrees(loss, inputs["velocity"], oracle["case_ocr_cfg_loss"], oracle["case_ocr_cfg_dloss_dv"])
    metrics = numbers(output.metrics)
    assert metrics["group_weight"] == pytest.approx(oracle["case_ocr_cfg_group_weight"].mean(), rel=1e-6)
    assert metrics["dropped_fraction"] == pytest.approx(oracle["case_ocr_cfg_should_clip"].mean())
    decay = default_config("dgpo").copies["old"]
    steps = oracle["ema_ref_decay_steps"].tolist()
    assert [decay.at(k) for k in steps] == pytest.approx(oracle["ema_ref_decay"].tolist())


@pytest.mark.parametrize("name", ["online_dpo", "offline_dpo"])
def test_losses_of_pairs_agree_with_their_code(name: str):
    """Adjacent rows are a pair, the chosen one first; the second pair is a tie that the code trains all the same."""
    oracle = oracle_of("online_dpo")
    inputs = inputs_of(oracle, advantage=[1.0, -1.0] * 3, group=[0, 0, 1, 1, 2, 2])
    output = loss_of(name, inputs, replace(default_config(name), beta=100.0))
    assert_agrees(output.loss, inputs["velocity"], oracle["beta100_loss"], oracle["beta100_dloss_dv"])
    assert numbers(output.metrics)["implicit_accuracy"] == pytest.approx(oracle["beta100_implicit_acc"].item())


def some_rows() -> dict[str, Tensor]:
    """Two groups of two samples at three points, with errors about 1."""
    generator = torch.Generator().manual_seed(1)
    inputs = {name: torch.randn(12, 3, 4, generator=generator) for name in LATENTS}
    for name in LATENTS[2:]:  # near the target, so that ratios are near 1
        inputs[name] = inputs["noise"] - inputs["clean"] + 0.3 * inputs[name]
    inputs["noisy"] = inputs["clean"] + 0.5 * (inputs["noise"] - inputs["clean"])
    inputs["sigma"] = torch.linspace(1.0, 0.1, 12)
    inputs["advantage"] = torch.tensor([1.5] * 3 + [-2.0] * 3 + [-0.3] * 3 + [7.0] * 3)
    inputs["group"], inputs["sample"] = torch.arange(12) // 6, torch.arange(12) // 3
    inputs["point"] = torch.arange(12) % 3
    return inputs


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("awm", {}),
        ("awm", {"clip_range": 0.02, "kl_coef": 0.0, "advantage_max": 3.0}),
        ("awm", {"weighting": "t", "ema_kl_coef": 0.0, "kl_coef": 0.7}),
        ("awm", {"power": 0.6, "clip_range": 0.01}),
        *(("awm", {"weighting": weighting, "clip_range": 0.02}) for weighting in ("uniform", "t**2", "huber")),
        ("awm_off_policy", {"clip_range": 0.02}),
        ("awm_off_policy", {"kl_coef": 0.0, "ema_kl_coef": 0.0}),
        ("diffusion_nft", {"beta": 0.1, "kl_coef": 0.0}),
        ("diffusion_nft", {"beta": 1.7, "kl_coef": 0.3}),
        ("dgpo", {}),
        ("dgpo", {"beta": 3.0, "clip": 0.02}),
        ("dgpo", {"beta": 20.0, "clip": math.inf}),
        ("online_dpo", {"beta": 20.0}),
        ("offline_dpo", {"beta": 20.0}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_the_formula(name: str, settings: dict[str, Any]):
    inputs, config = some_rows(), replace(default_config(name), **settings)
    velocity = inputs["velocity"].requires_grad_()
    output = loss_of(name, inputs, config)
    (found,) = torch.autograd.grad(output.loss, velocity)
    rows = [
        {key: int(value[row]) if key in ("group", "sample", "point") else value[row] for key, value in inputs.items()}
        for row in range(12)
    ]
    expected = slow_loss(name, rows, config)
    if name != "dgpo":  # its reference has the gradient alone
        torch.testing.assert_close(output.loss.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(found, torch.autograd.grad(expected, velocity)[0], rtol=1e-4, atol=1e-7)
    if "clip" in str(settings) and config.clip_widths:
        assert 0 < numbers(output.metrics)["clip_fraction"] < 1


@pytest.mark.parametrize("name", ["awm", "awm_off_policy", "dgpo", "online_dpo", "offline_dpo"])
def test_a_missing_input_is_an_error_that_names_what_is_there(name: str):
    inputs, config = some_rows(), default_config(name)
    needed = [*find_objective(name).latents_for(config), "advantage"]
    if (joint := find_objective(name).joint) is None:
        needed.append("sigma")
    else:
        inputs[joint.column] = torch.ones(12)
        needed.append(joint.column)
    for missing in dict.fromkeys(needed):
        rest = {key: value for key, value in inputs.items() if key != missing}
        with pytest.raises(ValueError, match=rf"policy loss '{name}' needs .*{missing}.*; its inputs hold .*point"):
            policy_loss(name, rest, config)
    with pytest.raises(ValueError, match=r"needs noise of shape \[N, ...\]"):
        policy_loss(name, inputs | {"noise": inputs["noise"][:5]}, config)


def test_a_pair_is_two_rows_with_opposite_signs():
    inputs, config = some_rows(), default_config("online_dpo")
    for wrong in ({"advantage": inputs["advantage"].abs()}, {"point": torch.zeros(12, dtype=torch.int64)}):
        with pytest.raises(ValueError, match=r"a loss of preference pairs needs two rows of each group at a point"):
            loss_of("online_dpo", inputs | wrong, config)


def test_samples_are_chosen_by_reward():
    assert (
        preferred_pair([0.0, 3.0, -1.0, 3.0]) == [1, 2] and not preferred_pair([1.0, 1.0]) and not preferred_pair([2.0])
    )
    rewards = [5.0, 1.0, 4.0, 0.0, 3.0, 2.0]
    assert best_and_worst(rewards, 2) == [0, 3] and best_and_worst(rewards, 4) == [0, 1, 2, 3]
    assert best_and_worst(rewards, 6) == best_and_worst(rewards, 24) == [0, 1, 2, 3, 4, 5]
    assert best_and_worst([1.0] * 5, 2) == [0, 4]
