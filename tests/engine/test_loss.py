# SPDX-License-Identifier: Apache-2.0
"""Additions of the engine's loss to the pure losses: choice of old log-probs, the KL term, the rollout check."""

import math
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.engine.harness import SAMPLING
from verl_digen.algorithms.rows import Metric, combine_tiles, combine_updates, numbers
from verl_digen.algorithms.sde import LAWS, SdeStep, sde_step
from verl_digen.config import DigenConfig, KlConfig, SdeConfig
from verl_digen.engine.loss import DiffusionLoss, rollout_gap
from verl_digen.engine.policies import Evaluated
from verl_digen.types import TrainingRows, Transitions


def make_rows(mask=(1.0, 1.0, 0.0)) -> TrainingRows:
    num_rows = len(mask)
    return TrainingRows(
        latents=torch.zeros(num_rows, 2),
        sigmas=torch.full((num_rows,), 0.8),
        point=Transitions(
            next_latents=torch.zeros(num_rows, 2),
            next_sigmas=torch.full((num_rows,), 0.6),
            sigma_max=torch.full((num_rows,), 0.9),
            log_probs=torch.zeros(num_rows),
        ),
        conditions=[{}] * num_rows,
        negative_conditions=None,
        advantages=torch.tensor([2.0, -1.0, 100.0]),
        mask=torch.tensor(mask),
        sampling=SAMPLING,
    )


def evaluated(log_prob: torch.Tensor) -> Evaluated:
    num_rows = len(log_prob)
    step = SdeStep(torch.zeros(num_rows, 2), log_prob, torch.ones(num_rows, 2), torch.full((num_rows,), 0.5))
    return Evaluated(torch.zeros(num_rows, 2), step)


def test_advantages_that_are_not_divided_yet_are_not_clamped():
    log_prob = torch.zeros(3, requires_grad=True)
    loss = DiffusionLoss(DigenConfig())
    rows = replace(make_rows((1.0, 1.0, 1.0)), advantages=torch.tensor([2.0, -1.0, 100.0]))
    for clamps, largest in ((True, 5.0), (False, 100.0)):
        terms = loss(evaluated(log_prob), {}, rows, None, num_rows=1, clamps=clamps)
        (gradient,) = torch.autograd.grad(terms.total, log_prob)
        assert gradient.tolist() == [-2.0, 1.0, -largest]


def test_kl_is_weighed_and_added():
    digen = DigenConfig(kl=KlConfig(coef=0.1, kind="flow_grpo"))
    others = {"reference": {"mean": torch.full((3, 2), 1.5)}}
    log_prob = torch.zeros(3)
    with_kl = DiffusionLoss(digen)(evaluated(log_prob), others, make_rows(), None, 2)
    without = DiffusionLoss(DigenConfig())(evaluated(log_prob), {}, make_rows(), None, 2)
    kl = 0.5**2 / (2 * 0.5**2 / 0.2)  # (mu - mu_ref)^2 / (2 s^2), s^2 = std^2 / -dt
    assert with_kl.metrics["kl"].value.item() == pytest.approx(kl, rel=1e-5)
    assert with_kl.fixed is not None and without.fixed is None
    assert with_kl.fixed.item() == pytest.approx(0.1 * kl, rel=1e-5)
    assert (with_kl.total - without.total).item() == pytest.approx(0.1 * kl, rel=1e-5)


def spread(law: str, sigma: float, sigma_next: float, eta: float) -> tuple[float, float]:
    """(std of x', noise rate) of a step, in fp64 by each law's own formula."""
    root = math.sqrt(sigma - sigma_next)
    rate = eta * math.sqrt(sigma / (1 - sigma))
    if law == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        return std, std
    rate = {"flow": rate, "flow_clipped": min(rate, 0.45 / root), "dance": eta}[law]
    return rate * root, rate


@pytest.mark.parametrize("law", LAWS)
def test_divergences_are_divided_by_the_spread_of_their_law(law):
    """Policies of constant velocities 0.3 and 0.1 on steps that the sampler's own kernel takes; all in fp64 by hand."""
    steps = [(0.95, 0.5), (0.8, 0.7), (0.6, 0.1)]
    sigma, following = (torch.tensor(each) for each in zip(*steps, strict=True))
    rows = replace(make_rows((1.0, 1.0, 1.0)), sigmas=sigma, sampling=replace(SAMPLING, law=law, noise_level=0.8))
    assert isinstance(rows.point, Transitions)
    rows = replace(rows, point=replace(rows.point, next_sigmas=following))
    taken, other = (
        sde_step(
            torch.full((3, 2), velocity), torch.full((3, 2), 0.4), sigma, following,
            law=law, noise_level=0.8, sigma_max=0.9, next_sample=torch.zeros(3, 2),
        )
        for velocity in (0.3, 0.1)
    )  # fmt: skip
    square = (taken.mean - other.mean).double()[:, 0].square().tolist()
    by_std, by_rate = (
        sum(each / (2 * spread(law, *step, 0.8)[place] ** 2) for each, step in zip(square, steps, strict=True)) / 3
        for place in (0, 1)
    )
    outputs = {"mean": other.mean, "velocity": torch.full((3, 2), 0.1), "log_prob": other.log_prob}
    others = {"reference": outputs, "teacher": outputs, "old": outputs}

    def metric(name: str, **digen: Any) -> float:
        loss = DiffusionLoss(DigenConfig(sde=SdeConfig(law=law), **digen))
        return loss(Evaluated(torch.full((3, 2), 0.3), taken), others, rows, None, 3).metrics[name].value.item()

    assert metric("kl", kl=KlConfig(0.1, "flow_grpo")) == pytest.approx(by_rate, rel=1e-5)
    assert metric("kl", kl=KlConfig(0.1, "exact")) == pytest.approx(by_std, rel=1e-5)
    assert metric("teacher_kl", loss={"name": "opd"}) == pytest.approx(by_rate, rel=1e-5)
    assert metric("divergence", loss={"name": "flow_dppo"}) == pytest.approx(by_std, rel=1e-5)
    if law == "flow":
        assert metric("ratio_drift", loss={"name": "grpo_guard"}) == pytest.approx(by_std, rel=1e-5)


@pytest.mark.parametrize("law", ["dance", "cps"])
def test_longcats_kl_is_refused_with_laws_that_its_weight_does_not_fit(law):
    with pytest.raises(ValueError, match=r"digen.sde.law must be flow or flow_clipped with digen.kl.kind=longcat, got"):
        DigenConfig(sde=SdeConfig(law=law), kl=KlConfig(coef=0.1, kind="longcat"))


def test_the_gap_to_generation_is_measured_over_rows_that_train():
    rows = {"log_prob": torch.tensor([0.2, -0.3, 0.0, 9.0]), "recorded": torch.zeros(4)}
    found = numbers(rollout_gap(rows | {"mask": torch.tensor([1.0, 1.0, 1.0, 0.0])}))
    expected = {
        "gap_mean": 0.5 / 3,
        "gap_max": 0.3,
        "ratio": (math.exp(0.2) + math.exp(-0.3) + 1) / 3,
        "ratio_above_fraction": 1 / 3,
        "ratio_below_fraction": 1 / 3,
        "ratio_deviation_max": 1 - math.exp(-0.3),
    }
    names = {name: f"rollout_log_prob_{name}" if name.startswith("gap") else f"rollout_{name}" for name in expected}
    assert found == pytest.approx({names[name]: value for name, value in expected.items()})
    tiny = {"log_prob": torch.tensor([1e-9]), "recorded": torch.zeros(1)}
    assert numbers(rollout_gap(tiny))["rollout_ratio_deviation_max"] == pytest.approx(1e-9)


def metrics(**values: float) -> dict[str, Metric]:
    """One metric per way of reduction, by its name."""
    return {name: Metric(torch.tensor(value), name) for name, value in values.items()}  # type: ignore[arg-type]


def test_settings_are_parsed_once_and_not_pickled():
    digen = DigenConfig(loss={"name": "tis", "high": 3.0})
    assert digen.loss_settings is digen.loss_settings
    copied = pickle.loads(pickle.dumps(digen))
    assert copied == digen and "loss_settings" not in vars(copied) and copied.loss_settings == digen.loss_settings


def test_metrics_combine_as_they_say():
    first = metrics(mean=1.0, count=2.0, max=1.0, min=1.0, first=3.0, first_max=5.0)
    second = metrics(mean=2.0, count=3.0, max=5.0, min=-1.0, first=4.0, first_max=7.0)
    assert numbers(combine_tiles([first, second])) == dict(mean=3, count=5, max=5, min=-1, first=7, first_max=7)
    assert numbers(combine_updates([first, second])) == dict(mean=1.5, count=5, max=5, min=-1, first=3, first_max=5)
    assert numbers(combine_updates([metrics(mean=1.0), {}])) == {"mean": 1.0}
    shares = {name: metric.scaled(2.0) for name, metric in first.items()}
    assert numbers(shares) == dict(mean=2, count=2, max=1, min=1, first=6, first_max=5)


def test_settings_that_do_not_go_with_the_loss_are_refused():
    for values, message in (
        (
            {"name": "tis", "old_log_probs": "recompute"},
            "digen.loss.old_log_probs must be auto or rollout with digen.loss.name=tis",
        ),
        ({"name": "decoupled_ppo", "old_log_probs": "rollout"}, "digen.loss.old_log_probs must be auto or recompute"),
    ):
        with pytest.raises(ValueError, match=message):
            DiffusionLoss(DigenConfig(loss=values))
