# SPDX-License-Identifier: Apache-2.0
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from verl_digen.algorithms.sde import LAWS, sde_step

ORACLES = Path(__file__).parents[1] / "fixtures" / "oracles"
ETA = {"flow": 0.7, "flow_clipped": 1.5, "dance": 0.3, "cps": 0.8}


def reference_step(v, x, sigma, sigma_next, law, eta, sigma_max, noise):
    """One row, in fp64 and written out law by law: x', log-prob, mean, std."""
    v, x = v.double(), x.double()
    sigma, sigma_next, eta, sigma_max = (
        float(torch.as_tensor(number, dtype=torch.float32)) for number in (sigma, sigma_next, eta, sigma_max)
    )
    dt = sigma_next - sigma
    if law == "cps":
        std = sigma_next * math.sin(eta * math.pi / 2)
        mean = (1 - sigma_next) * (x - sigma * v) + math.sqrt(sigma_next**2 - std**2) * (x + (1 - sigma) * v)
    elif law == "dance":
        std = eta * math.sqrt(-dt)
        clean = x - sigma * v
        mean = x + v * dt + 0.5 * eta**2 * (x - (1 - sigma) * clean) / sigma**2 * dt
    else:
        s = eta * math.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
        if law == "flow_clipped":
            s = min(s, 0.45 / math.sqrt(-dt))
        std = s * math.sqrt(-dt)
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    x_next = mean + std * noise.double()
    if law == "cps":
        log_prob = -((x_next - mean) ** 2).mean()
    else:
        log_prob = (-((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean()
    return x_next, log_prob.item(), mean, std


def rows(shape=(4, 6), num_rows=5, seed=0, dtype=torch.float32):
    """Velocity, sample, noise of rows at the steps of one schedule, the first of which starts at sigma 1."""
    generator = torch.Generator().manual_seed(seed)
    v, x, noise = torch.randn(3, num_rows, *shape, generator=generator).to(dtype)
    schedule = torch.linspace(1, 0.1, num_rows + 1)
    schedule = 3 * schedule / (1 + 2 * schedule)
    return v, x, noise, schedule[:-1], schedule[1:], schedule[1]


def take(law, *, noise_level=None, **overrides):
    v, x, noise, sigma, sigma_next, sigma_max = rows()
    arguments = dict(velocity=v, sample=x, sigma=sigma, sigma_next=sigma_next, sigma_max=sigma_max, noise=noise)
    return sde_step(law=law, noise_level=ETA.get(law) if noise_level is None else noise_level, **arguments | overrides)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("shape", [(), (7,), (4, 6, 6), (3, 2, 4, 4)], ids=str)
def test_every_law_agrees_with_the_fp64_reference_for_mixed_rows_of_any_shape(law, shape):
    v, x, noise, sigma, sigma_next, sigma_max = rows(shape)
    etas = torch.tensor([1.0, 0.5, 0.9, 0.7, 0.2]) * ETA[law]
    step = sde_step(v, x, sigma, sigma_next, law=law, noise_level=etas, sigma_max=sigma_max, noise=noise)
    for n in range(len(x)):
        x_next, log_prob, mean, std = reference_step(
            v[n], x[n], sigma[n], sigma_next[n], law, etas[n], sigma_max, noise=noise[n]
        )
        torch.testing.assert_close(step.next_sample[n].double(), x_next, atol=1e-6, rtol=0)
        torch.testing.assert_close(step.mean[n].double(), mean, atol=1e-6, rtol=0)
        assert step.std[n].item() == pytest.approx(std, abs=1e-6)
        assert step.log_prob[n].item() == pytest.approx(log_prob, abs=1e-5)
    assert {t.dtype for t in (step.next_sample, step.log_prob, step.mean, step.std)} == {torch.float32}


@pytest.mark.parametrize(("law", "noise_level"), [("flow", 0.7), ("dance", 0.3)])
def test_a_law_agrees_with_the_code_that_published_it(law, noise_level):
    """Flow-GRPO's and DanceGRPO's."""
    saved = np.load(ORACLES / f"sde_{law}_{noise_level}.npz")
    oracle = {name: torch.from_numpy(np.asarray(value)) for name, value in saved.items()}
    sigmas = oracle["sigmas"]
    for i in range(len(sigmas) - 1):
        step = sde_step(
            oracle["velocity"],
            oracle["sample"],
            sigmas[i].expand(3),
            sigmas[i + 1].expand(3),
            law=law,
            noise_level=noise_level,
            sigma_max=sigmas[1],
            next_sample=oracle["next_sample"][i],
        )
        torch.testing.assert_close(step.mean, oracle["mean"][i], atol=1e-6, rtol=0)
        torch.testing.assert_close(step.log_prob, oracle["log_prob"][i], atol=1e-5, rtol=0)
        if law == "flow":
            torch.testing.assert_close(step.std, oracle["std"][i], atol=1e-6, rtol=0)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("storage_dtype", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_scoring_a_stored_step_repeats_its_log_prob_bitwise(law, storage_dtype):
    taken = take(law, storage_dtype=storage_dtype)
    assert taken.next_sample.dtype == (storage_dtype or torch.float32)
    scored = take(law, noise=None, next_sample=taken.next_sample)
    assert torch.equal(scored.log_prob, taken.log_prob)
    assert torch.equal(scored.mean, taken.mean)
    assert scored.next_sample is taken.next_sample


@pytest.mark.parametrize("law", LAWS)
def test_low_precision_latents_are_computed_in_fp32(law):
    v, x, noise, *_ = rows(dtype=torch.bfloat16)
    half, full = (
        take(law, velocity=v.to(dtype), sample=x.to(dtype), noise=noise.to(dtype))
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert torch.equal(half.next_sample, full.next_sample)
    assert torch.equal(half.log_prob, full.log_prob)


@pytest.mark.parametrize("law", LAWS)
def test_eta_0_is_the_ode_step_whatever_the_noise(law):
    v, x, _, sigma, sigma_next, _ = rows()
    step = take(law, noise_level=0.0)
    ode = x + v * (sigma_next - sigma)[:, None, None]
    torch.testing.assert_close(step.next_sample, ode, atol=1e-6, rtol=0)
    assert torch.equal(step.log_prob, torch.zeros(5))
    assert torch.equal(step.std, torch.zeros(5))


@pytest.mark.parametrize("law", LAWS)
def test_an_ode_step_that_overflows_the_storage_dtype_has_log_prob_0(law):
    step = take(law, sample=torch.full((5, 4, 6), 1e6), noise_level=0.0, storage_dtype=torch.float16)
    assert step.next_sample.isinf().any()
    assert torch.equal(step.log_prob, torch.zeros(5))


@pytest.mark.parametrize("law", LAWS)
def test_ode_rows_and_sde_rows_share_a_call(law):
    on = torch.tensor([True, False, True, False, True])
    mixed = take(law, noise_level=torch.where(on, ETA[law], 0.0))
    sde, ode = take(law), take(law, noise_level=0.0)
    assert torch.equal(mixed.next_sample, torch.where(on[:, None, None], sde.next_sample, ode.next_sample))
    assert torch.equal(mixed.log_prob, torch.where(on, sde.log_prob, 0.0))


@pytest.mark.parametrize("law", LAWS)
def test_scoring_a_deterministic_row_is_an_error_that_names_it(law):
    etas = torch.full((5,), ETA[law])
    etas[3] = 0
    with pytest.raises(ValueError, match=r"deterministic step has no log-prob, got std 0 in rows \[3\]"):
        take(law, noise_level=etas, noise=None, next_sample=torch.zeros(5, 4, 6))


def test_the_last_step_of_cps_is_deterministic_and_of_flow_is_not():
    last = dict(sigma_next=torch.zeros(5))
    assert torch.equal(take("cps", **last).log_prob, torch.zeros(5))
    with pytest.raises(ValueError, match="no log-prob"):
        take("cps", **last, noise=None, next_sample=torch.zeros(5, 4, 6))
    assert (take("flow", **last).std > 0).all()


@pytest.mark.parametrize("law", LAWS)
def test_the_first_step_is_finite_also_when_sigma_misses_1_by_rounding(law):
    exact = take(law)
    for off in (-1e-7, 1e-7):
        sigma = rows()[3].clone()
        sigma[0] += off
        step = take(law, sigma=sigma)
        torch.testing.assert_close(step.std, exact.std, atol=1e-5, rtol=0)
        torch.testing.assert_close(step.mean, exact.mean, atol=1e-5, rtol=0)


@pytest.mark.parametrize("law", LAWS)
def test_the_gradient_of_the_log_prob_reaches_the_velocity_only_through_the_mean(law):
    v, x, noise, sigma, sigma_next, sigma_max = rows(shape=(3,))
    recorded = torch.randn(5, 3, generator=torch.Generator().manual_seed(1)).requires_grad_()
    velocity = v.clone().requires_grad_()
    take(law, velocity=velocity, sample=x, noise=None, next_sample=recorded).log_prob.sum().backward()
    assert recorded.grad is None
    assert velocity.grad is not None
    for n in range(5):
        w = v[n].double().requires_grad_()
        arguments = (w, x[n], sigma[n], sigma_next[n], law, ETA[law], sigma_max)
        _, _, mean, std = reference_step(*arguments, noise=noise[n])
        scale = 1.0 if law == "cps" else 1 / (2 * std**2)
        (-((recorded[n].detach().double() - mean) ** 2).mean() * scale).backward()
        torch.testing.assert_close(velocity.grad[n].double(), w.grad, atol=1e-6, rtol=1e-5)


def test_a_step_taken_with_gradients_has_the_same_log_prob_gradient_as_when_scored():
    gradients = []
    for given in ({}, {"noise": None, "next_sample": take("flow").next_sample}):
        velocity = rows()[0].requires_grad_()
        take("flow", velocity=velocity, **given).log_prob.sum().backward()
        gradients.append(velocity.grad)
    assert torch.equal(*gradients)


def test_cps_keeps_the_coefficients_of_point_data():
    """With data at one point x_0, x' = (1 - sigma') x_0 + sigma' (a standard normal)."""
    generator = torch.Generator().manual_seed(0)
    eps, noise = torch.randn(2, 1, 50000, generator=generator)
    sigma, sigma_next, x_0 = torch.tensor([0.8]), torch.tensor([0.6]), 3.0
    x, velocity = (1 - 0.8) * x_0 + 0.8 * eps, eps - x_0
    step = sde_step(velocity, x, sigma, sigma_next, law="cps", noise_level=0.8, sigma_max=0.9, noise=noise)
    assert step.next_sample.mean().item() == pytest.approx((1 - 0.6) * x_0, abs=0.01)
    assert step.next_sample.std().item() == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(law="euler"), "unknown SDE law 'euler'; known laws: flow, flow_clipped, dance, cps"),
        (dict(noise=None), "either noise"),
        (dict(next_sample=torch.zeros(5, 4, 6)), "either noise"),
        (dict(noise=torch.zeros(4, 6)), "must be of one shape"),
        (dict(sigma=torch.ones(4)), r"sigma must have shape \[5\].* got \[4\]"),
        (dict(sigma_next=torch.tensor(0.5)), r"sigma_next must have shape \[5\]"),
        (dict(noise_level=torch.ones(5, 1)), r"noise_level must have shape \[5\]"),
        (dict(sigma_next=torch.ones(5)), "a step must go down"),
        (dict(sigma_next=torch.full((5,), -0.1)), "a step must go down"),
        (dict(sigma=torch.full((5,), 1.5)), "a step must go down"),
        (dict(sigma=torch.full((5,), math.nan)), "a step must go down"),
        (dict(noise_level=-0.1), "noise_level must be >= 0"),
        (dict(noise_level=math.nan), "noise_level must be >= 0"),
        (dict(law="cps", noise_level=1.2), "noise_level must be <= 1 under law cps"),
        (dict(sigma_max=1.0), "sigma_max must be the schedule's second sigma"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_is_wrong(overrides, message):
    with pytest.raises(ValueError, match=message):
        take(**dict(law="flow") | overrides)


def test_a_step_that_is_taken_again_has_the_same_numbers_whatever_was_done_to_the_first_one():
    sample, velocity, noise = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    sigma, sigma_next = torch.tensor([0.9, 0.5]), torch.tensor([0.8, 0.4])

    def take():
        given = {"law": "flow", "noise_level": torch.tensor([0.7, 0.0]), "sigma_max": 0.9, "noise": noise}
        return sde_step(velocity, sample, sigma, sigma_next, **given)

    with torch.inference_mode():
        first = take()
        kept = first.mean.clone(), first.std.clone(), first.log_prob.clone()
        first.std.fill_(9.0)
    again = take()
    assert all(torch.equal(got, own) for got, own in zip((again.mean, again.std, again.log_prob), kept, strict=True))
    velocity.requires_grad_()
    take().log_prob.sum().backward()
    assert velocity.grad is not None, "numbers that were computed in inference mode serve a backward too"
