# SPDX-License-Identifier: Apache-2.0
"""ODE solvers: against diffusers, against a solved ODE, and beside stochastic steps."""

import math
from itertools import pairwise

import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler

from verl_digen.algorithms.sde import LAWS, sde_step
from verl_digen.algorithms.solvers import SOLVERS, Prediction, denoise_step

MEAN, SPREAD = 0.7, 0.3
"""A data distribution N(0.7, 0.3²), for which the velocity and the ODE's solution are known."""


def variance(sigma: float) -> float:
    return (1 - sigma) ** 2 * SPREAD**2 + sigma**2


def exact(start: torch.Tensor, sigma: float, sigma_next: float) -> torch.Tensor:
    """The ODE's solution at `sigma_next` from `start` at `sigma`: quantiles stay what they are."""
    z = (start - (1 - sigma) * MEAN) / math.sqrt(variance(sigma))
    return (1 - sigma_next) * MEAN + math.sqrt(variance(sigma_next)) * z


def velocity_at(x: torch.Tensor, sigma: float) -> torch.Tensor:
    slope = sigma - (1 - sigma) * SPREAD**2
    return -MEAN + slope / variance(sigma) * (x - (1 - sigma) * MEAN)


def curved(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return 0.3 * x + torch.sin(3 * x + sigma)


def run(solver, x, sigmas, velocity, sde=(), law="flow", storage_dtype=torch.float32):
    """All steps of a schedule -> latents after each. `sde`: step -> stochastic rows."""
    previous, path, steps = None, [], []
    generator = torch.Generator().manual_seed(1)
    for step in range(len(sigmas) - 1):
        is_sde = [step in sde[row] for row in range(len(x))] if sde else [False] * len(x)
        taken, previous = denoise_step(
            velocity(x.float(), sigmas[step].item()),
            x,
            sigmas[step].expand(len(x)),
            sigmas[step + 1].expand(len(x)),
            solver=solver,
            is_sde=is_sde,
            previous=previous,
            law=law,
            noise_level=0.3,
            sigma_max=sigmas[1],
            noise=torch.randn(x.shape, generator=generator),
            storage_dtype=storage_dtype,
        )
        x = taken.next_sample
        path.append(x)
        steps.append(taken)
    return path, steps


def shifted(num_steps: int, first: float = 1.0) -> torch.Tensor:
    fraction = torch.linspace(first, 0, num_steps + 1)
    return 3 * fraction / (1 + 2 * fraction)


def start(shape=(5, 4, 6), seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_steps", [2, 3, 10, 25])
@pytest.mark.parametrize("first", [1.0, 0.999])
def test_dpm2_is_diffusers_multistep_dpm_solver(num_steps, first):
    sigmas = shifted(num_steps, first)
    scheduler = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        final_sigmas_type="zero",
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas = sigmas.clone()
    x = start()
    path, _ = run("dpm2", x, sigmas, curved)
    for step, timestep in enumerate(scheduler.timesteps):
        (x,) = scheduler.step(curved(x, sigmas[step].item()), timestep, x, return_dict=False)
        torch.testing.assert_close(path[step], x, atol=5e-6, rtol=0)
    assert num_steps <= 3 or (run("euler", start(), sigmas, curved)[0][-1] - path[-1]).abs().max() > 1e-2


@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("dpm2", 2)])
def test_the_error_falls_with_the_solvers_order(solver, order):
    errors = []
    for num_steps in (32, 64, 128):
        sigmas = torch.linspace(0.9, 0.1, num_steps + 1)
        x = start()
        expected = exact(x, 0.9, 0.1)
        errors.append((run(solver, x, sigmas, velocity_at)[0][-1] - expected).abs().max().item())
    slopes = [math.log2(coarse / fine) for coarse, fine in pairwise(errors)]
    assert all(abs(slope - order) < 0.3 for slope in slopes), (errors, slopes)


def test_dpm2_is_closer_at_the_steps_that_training_takes():
    """From noise to sample in ten steps of v = 0.3 x + 0.5 sigma, whose solution is known."""

    def solution(x: torch.Tensor) -> torch.Tensor:
        """x = C exp(0.3 sigma) - (0.5 / 0.3) (sigma + 1 / 0.3), at sigma 0."""
        factor = (x + 0.5 / 0.3 * (1 + 1 / 0.3)) * math.exp(-0.3)
        return factor - 0.5 / 0.3 / 0.3

    sigmas, x = shifted(10), start()
    euler, dpm2 = (
        (run(solver, x, sigmas, lambda x, sigma: 0.3 * x + 0.5 * sigma)[0][-1] - solution(x)).abs().mean()
        for solver in SOLVERS
    )
    assert dpm2 < 0.6 * euler


def test_ddim_without_noise_is_euler():
    x, sigmas = start(), shifted(10)
    path, _ = run("euler", x, sigmas, curved)
    for step in range(10):
        sigma, sigma_next = sigmas[step].double(), sigmas[step + 1].double()
        v = curved(x.float(), sigma.item()).double()
        x = ((1 - sigma_next) * (x - sigma * v) + sigma_next * (x + (1 - sigma) * v)).float()
        torch.testing.assert_close(path[step], x, atol=2e-6, rtol=0)


def test_euler_is_the_sde_step_without_noise_bitwise():
    x, sigmas = start(), shifted(6)
    path, steps = run("euler", x, sigmas, curved, storage_dtype=torch.bfloat16)
    for step in range(6):
        expected = sde_step(
            curved(x.float(), sigmas[step].item()),
            x,
            sigmas[step].expand(5),
            sigmas[step + 1].expand(5),
            law="flow",
            noise_level=0.0,
            sigma_max=sigmas[1],
            noise=torch.zeros_like(x),
            storage_dtype=torch.bfloat16,
        )
        assert torch.equal(path[step], expected.next_sample) and torch.equal(steps[step].mean, expected.mean)
        x = path[step]


@pytest.mark.parametrize("law", LAWS)
def test_a_stochastic_step_is_the_same_with_either_solver_bitwise(law):
    """Rows with windows at steps 0-1, 2-3, 1 and 3, none, and all steps but the last."""
    windows = [(0, 1), (2, 3), (1, 3), (), tuple(range(9))]
    x, sigmas = start(), shifted(10)
    path, _ = run("dpm2", x, sigmas, curved, sde=windows, law=law)
    before = [x, *path]
    generator = torch.Generator().manual_seed(1)
    for step in range(10):
        noise = torch.randn(x.shape, generator=generator)
        rows = [row for row in range(5) if step in windows[row]]
        if not rows:
            continue
        expected = sde_step(
            curved(before[step].float(), sigmas[step].item())[rows],
            before[step][rows],
            sigmas[step].expand(len(rows)),
            sigmas[step + 1].expand(len(rows)),
            law=law,
            noise_level=0.3,
            sigma_max=sigmas[1],
            noise=noise[rows],
            storage_dtype=torch.float32,
        )
        assert torch.equal(path[step][rows], expected.next_sample)


def test_the_step_after_a_window_is_eulers_and_rows_do_not_share_what_was_predicted():
    windows = [(0, 1), (2, 3), (), (4,), ()]
    x, sigmas = start(), shifted(10)
    path, _ = run("dpm2", x, sigmas, curved, sde=windows)
    states = [x, *path]
    for row, window in enumerate(windows):
        for step in range(10):
            if step in window:
                continue
            v = curved(states[step], sigmas[step].item())[row]
            euler = states[step][row] + v * (sigmas[step + 1] - sigmas[step])
            is_first_order = step in (0, 1, 9) or step - 1 in window
            gap = (path[step][row] - euler).abs().max().item()
            assert (gap < 1e-6) == is_first_order, (row, step, gap)
    for row, window in enumerate(windows):
        if not window:  # a row of a batch is the row on its own
            alone, _ = run("dpm2", x[row : row + 1], sigmas, curved)
            torch.testing.assert_close(alone[-1][0], path[-1][row], atol=1e-6, rtol=0)


def test_latents_are_rounded_after_the_second_order_term():
    x, sigmas = start().bfloat16(), shifted(6)
    _, steps = run("dpm2", x, sigmas, curved, storage_dtype=torch.bfloat16)
    for taken in steps:
        assert torch.equal(taken.next_sample, taken.mean.bfloat16())


def test_rows_of_a_prediction_are_those_chosen():
    prediction = Prediction(torch.arange(3.0).view(3, 1), torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64))
    chosen = prediction.rows([2, 0, 0])
    assert chosen.clean.flatten().tolist() == [2.0, 0.0, 0.0] and chosen.sigma.tolist() == [0.3, 0.1, 0.1]


def test_an_unknown_solver_is_refused():
    with pytest.raises(ValueError, match="unknown ODE solver 'heun'; known solvers: euler, dpm2"):
        run("heun", start(), shifted(2), curved)
