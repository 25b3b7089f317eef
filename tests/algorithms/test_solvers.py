# SPDX-License-Identifier: Apache-2.0
"""ODE solvers: against diffusers, against a solved ODE, and beside stochastic steps."""

import math
from pathlib import Path

import pytest
import torch
from diffusers.schedulers.scheduling_dpmsolver_multistep import DPMSolverMultistepScheduler
from diffusers.schedulers.scheduling_sasolver import SASolverScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

from verl_digen.algorithms.sde import LAWS, sde_step
from verl_digen.algorithms.solvers import DETERMINISTIC, Prediction, SolverNoise, denoise_step

MEAN, SPREAD = 0.7, 0.3
"""A data distribution N(0.7, 0.3²), for which the velocity and the ODE's solution are known."""


def variance(sigma: float) -> float:
    return (1 - sigma) ** 2 * SPREAD**2 + sigma**2


def exact(start: torch.Tensor, sigma: float, sigma_next: float) -> torch.Tensor:
    """The ODE's solution at `sigma_next` from `start` at `sigma`: quantiles stay what they are."""
    z = (start - (1 - sigma) * MEAN) / math.sqrt(variance(sigma))
    return (1 - sigma_next) * MEAN + math.sqrt(variance(sigma_next)) * z


def curved(x: torch.Tensor, sigma: float) -> torch.Tensor:
    return 0.3 * x + torch.sin(3 * x + sigma)


MULTISTEP = ("dpm2", "unipc")
NOISE = SolverNoise(0.4, 0.3, 0.9)


def run(solver, x, sigmas, velocity, sde=(), law="flow", storage_dtype=torch.float32, solver_noise=NOISE):
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
            solver_noise=solver_noise,
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


@pytest.mark.parametrize("num_steps", [2, 3, 10, 25])
@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_unipc_is_diffusers_unipc_on_the_schedule_of_a_wan_checkpoint(num_steps, shift):
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    assert (scheduler.config["solver_order"], scheduler.config["solver_type"]) == (2, "bh2")
    scheduler.set_timesteps(num_steps)
    sigmas, x = scheduler.sigmas, start()
    path, _ = run("unipc", x, sigmas, curved)
    for step, timestep in enumerate(scheduler.timesteps):
        (x,) = scheduler.step(curved(x, sigmas[step].item()), timestep, x, return_dict=False)
        torch.testing.assert_close(path[step], x, atol=1e-5, rtol=0)
    assert num_steps <= 2 or (run("dpm2", start(), sigmas, curved)[0][-1] - path[-1]).abs().max() > 1e-3


def test_unipc_after_sigma_1_is_the_limit_of_sigmas_just_below():
    at_one, below = (run("unipc", start(), shifted(10, first), curved)[0][-1] for first in (1.0, 1 - 1e-30))
    assert torch.equal(at_one, below)  # 1 - 1e-30 is 1 in floating point: the schedule of most models
    near = run("unipc", start().double(), shifted(10, 1 - 1e-7), curved)[0][-1]
    torch.testing.assert_close(at_one, near, atol=0.02, rtol=0)
    assert at_one.isfinite().all()


@pytest.mark.parametrize("num_steps", [4, 14])
@pytest.mark.parametrize("noise", [SolverNoise(0.0, 0.0, 1.0), SolverNoise(0.4, 0.3, 0.9), SolverNoise(1.2, 0.0, 1.0)])
def test_sa_is_diffusers_sa_solver_without_its_first_corrector(num_steps, noise, monkeypatch):
    """AWM's variant: tau of the sigma where a step ends, and no corrector in the second step."""
    sigmas, x, generator = shifted(num_steps, 0.999), start(), torch.Generator().manual_seed(1)
    levels = {1000 - step: noise.at(sigmas[step + 1].double()) for step in range(num_steps)}
    scheduler = SASolverScheduler(
        predictor_order=2,
        corrector_order=2,
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        tau_func=lambda timestep: levels[int(timestep)],
    )
    scheduler.set_timesteps(num_steps)
    scheduler.sigmas, scheduler.timesteps = sigmas.double(), torch.tensor(list(levels))
    path, steps = run("sa", x, sigmas, curved, solver_noise=noise)
    for step in range(num_steps - 1):  # diffusers ends above sigma 0
        if step == 1:
            scheduler.last_sample = None
        v = curved(x.float(), sigmas[step].item())
        (x,) = scheduler.step(v, scheduler.timesteps[step], x, generator=generator, return_dict=False)
        torch.testing.assert_close(path[step], x.float(), atol=2e-5, rtol=0)
        is_noisy = noise.level > 0 and noise.low <= sigmas[step + 1] <= noise.high
        assert (steps[step].std > 0).tolist() == [is_noisy] * 5
        assert not steps[step].log_prob.any()
    clean = path[-2] - sigmas[-2] * curved(path[-2], sigmas[-2].item())
    torch.testing.assert_close(path[-1], clean, atol=2e-6, rtol=0)


def test_sa_is_finite_from_sigma_1_and_its_noise_is_that_of_the_interval():
    path, steps = run("sa", start(), shifted(14), curved)
    assert all(x.isfinite().all() for x in path)
    ends = shifted(14)[1:]
    assert [bool(step.std.any()) for step in steps] == [0.3 <= end <= 0.9 for end in ends.tolist()]
    quiet, _ = run("sa", start(), shifted(14), curved, solver_noise=SolverNoise(0.0, 0.3, 0.9))
    assert (quiet[-1] - path[-1]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("solver", "errors"),
    [
        ("euler", (0.0724, 0.0358, 0.0177)),
        ("dpm2", (0.0567, 0.0145, 0.0015)),
        ("unipc", (0.0510, 0.0129, 0.0018)),
        ("sa", (0.0415, 0.0052, 0.0020)),
    ],
)
def test_errors_are_those_of_the_table_in_the_documentation(solver, errors):
    """From noise to sample in 5, 10 and 20 steps of v = 0.3 x + 0.5 sigma, whose solution is known; `sa` without its
    noise."""

    def solution(x: torch.Tensor) -> torch.Tensor:
        """x = C exp(0.3 sigma) - (0.5 / 0.3) (sigma + 1 / 0.3), at sigma 0."""
        factor = (x + 0.5 / 0.3 * (1 + 1 / 0.3)) * math.exp(-0.3)
        return factor - 0.5 / 0.3 / 0.3

    x, velocity = start(), lambda x, sigma: 0.3 * x + 0.5 * sigma
    for num_steps, error in zip((5, 10, 20), errors, strict=True):
        path, _ = run(solver, x, shifted(num_steps), velocity, solver_noise=SolverNoise(0.0, 0.0, 1.0))
        assert (path[-1] - solution(x)).abs().mean().item() == pytest.approx(error, abs=6e-5)
    row = f"| `{solver}` | {' | '.join(f'{error:.4f}' for error in errors)} |"
    assert row in (Path(__file__).parents[2] / "docs" / "algorithms" / "windows.md").read_text()


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


@pytest.mark.parametrize("solver", DETERMINISTIC[1:])
@pytest.mark.parametrize("law", LAWS)
def test_a_stochastic_step_is_the_same_with_any_solver_bitwise(law, solver):
    """Rows with windows at steps 0-1, 2-3, 1 and 3, none, and all steps but the last."""
    windows = [(0, 1), (2, 3), (1, 3), (), tuple(range(9))]
    x, sigmas = start(), shifted(10)
    path, _ = run(solver, x, sigmas, curved, sde=windows, law=law)
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


@pytest.mark.parametrize("solver", MULTISTEP)
def test_a_row_goes_on_after_its_window_as_one_that_begins_there_alone(solver):
    windows = [(0, 1), (2, 3), (1, 2), (4,), ()]
    x, sigmas = start(), shifted(10)
    path, _ = run(solver, x, sigmas, curved, sde=windows)
    states = [x, *path]
    for row, window in enumerate(windows):
        end = max(window, default=-1) + 1
        before, _ = run(solver, x[row : row + 1], sigmas, curved)
        after, _ = run(solver, states[end][row : row + 1], sigmas[end:], curved)
        for step, alone in enumerate(before[: min(window, default=10)]):
            torch.testing.assert_close(alone[0], path[step][row], atol=1e-6, rtol=0)
        torch.testing.assert_close(after[-1][0], path[-1][row], atol=1e-6, rtol=0)


@pytest.mark.parametrize("solver", MULTISTEP)
def test_latents_are_rounded_after_the_second_order_term(solver):
    x, sigmas = start().bfloat16(), shifted(6)
    _, steps = run(solver, x, sigmas, curved, storage_dtype=torch.bfloat16)
    for taken in steps:
        assert torch.equal(taken.next_sample, taken.mean.bfloat16())


def test_rows_of_a_prediction_are_those_chosen_and_joined_again():
    numbers = torch.arange(3)
    known = Prediction(numbers.view(3, 1), numbers / 4, -numbers.view(3, 1), numbers / 8, numbers)
    chosen = known.rows([2, 0, 0])
    assert (chosen.clean.flatten().tolist(), chosen.count.tolist()) == ([2, 0, 0], [2, 0, 0])
    assert chosen.earlier.flatten().tolist() == [-2, 0, 0] and chosen.earlier_sigma.tolist() == [0.25, 0.0, 0.0]
    joined = Prediction.join([known.rows([row]) for row in range(3)])
    assert joined is not None and all(torch.equal(vars(joined)[name], vars(known)[name]) for name in vars(known))
    assert Prediction.join([]) is None
