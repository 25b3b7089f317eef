# SPDX-License-Identifier: Apache-2.0
"""Solvers for the steps that are not stochastic under an SDE law, and the one denoising step that all samplers take.

Each takes one forward a step. What a solver adds to Euler's step is `Terms` of noise levels; a new one is one file and
one line of `_TERMS`. For flow matching DDIM without noise is Euler's step, so both names mean it. `sa` records no
log-prob: a step of it is not one Gaussian around what training could replay.

A run of solver steps begins at the start and after each stochastic step, which neither reads nor leaves a prediction:
it is `sde_step`. The first step of a run is of first order, and so is the one that ends at sigma 0.

Invariants (tests/algorithms/test_solvers.py): `euler` is bitwise `sde_step`; stochastic rows are bitwise `euler`'s
rows; `dpm2`, `unipc` and `sa` are diffusers' schedulers of that kind; the error of `dpm2` falls with the square of
the step, `unipc`'s with its cube.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from verl_digen.algorithms.sde import Numbers, SdeStep, sde_step
from verl_digen.algorithms.solvers.dpm2 import dpm2
from verl_digen.algorithms.solvers.sa import sa
from verl_digen.algorithms.solvers.terms import NO_NOISE, Prediction, Schedule, Solver, SolverNoise
from verl_digen.algorithms.solvers.unipc import unipc
from verl_digen.hardware.transfers import to_device

_TERMS: Mapping[str, Solver | None] = {"euler": None, "ddim": None, "dpm2": dpm2, "unipc": unipc, "sa": sa}

SOLVERS = tuple(_TERMS)
"""Values of `digen.sampling.solver`."""
FIRST_ORDER = tuple(name for name, solver in _TERMS.items() if solver is None)
"""Names of Euler's step."""
NOISY = ("sa",)
"""Solvers that take noise, from a generator of each sample and step."""
DETERMINISTIC = tuple(name for name in _TERMS if name not in NOISY)
"""Solvers of an ODE."""
SCHEDULERS: Mapping[str, str] = {
    "FlowMatchEulerDiscreteScheduler": "euler",
    "DPMSolverMultistepScheduler": "dpm2",
    "UniPCMultistepScheduler": "unipc",
    "SASolverScheduler": "sa",
}
"""diffusers' scheduler -> solver of that kind."""


def denoise_step(
    velocity: Tensor,
    sample: Tensor,
    sigma: Tensor | tuple[float, ...],
    sigma_next: Tensor | tuple[float, ...],
    *,
    solver: str,
    is_sde: Sequence[bool],
    previous: Prediction | None,
    law: str,
    noise_level: Numbers,
    sigma_max: Tensor | Numbers,
    noise: Tensor,
    storage_dtype: torch.dtype,
    solver_noise: SolverNoise = NO_NOISE,
) -> tuple[SdeStep, Prediction | None]:
    """Take one denoising step of N rows: `sde_step` where `is_sde`, else a step of `solver`. Errors as `sde_step`.

    Arguments as in `sde_step`, with sigmas on the host. `previous` is the result of the step before, None at the first
    one; `solver_noise` is the noise of a solver of `NOISY`, which alone reads `noise` in rows that are not stochastic.

    Returns the step, and the predictions that the next one reads (None with Euler's step, which needs none).
    """
    noise_levels = noise_level if isinstance(noise_level, tuple) else [noise_level] * len(is_sde)
    taken = sde_step(
        velocity,
        sample,
        sigma,
        sigma_next,
        law=law,
        noise_level=tuple(level if sde else 0.0 for level, sde in zip(noise_levels, is_sde, strict=True)),
        sigma_max=sigma_max,
        noise=noise,
        storage_dtype=storage_dtype,
    )
    terms_of = _TERMS[solver]
    if terms_of is None:
        return taken, None
    stochastic = torch.tensor(is_sde)
    start, end = (torch.as_tensor(numbers, dtype=torch.float64).clamp(max=1) for numbers in (sigma, sigma_next))
    clean = sample.float() - _per_row(start, sample) * velocity.float()
    known = previous or Prediction(clean, start, clean, start, torch.zeros(len(start), dtype=torch.int64))
    prediction = Prediction(clean, start, known.clean, known.sigma, torch.where(stochastic, 0, known.count + 1))
    terms = terms_of(Schedule(start, end, known.sigma, known.earlier_sigma, known.count, solver_noise))
    newest, older, of_x, of_clean, std = (
        torch.where(stochastic, 0.0, weight)
        for weight in (terms.newest, terms.older, terms.x_weight, terms.clean_weight, terms.std)
    )
    changes = (newest != 0) | (older != 0) | (of_x != 0) | (of_clean != 0) | (std != 0)
    if not changes.any():
        return taken, prediction
    mean = taken.mean + _per_row(newest, sample) * (clean - known.clean)
    for weight, latents in ((older, known.clean - known.earlier), (of_x, sample.float()), (of_clean, clean)):
        if weight.any():
            mean = mean + _per_row(weight, sample) * latents
    drawn = mean + _per_row(std, sample) * noise.to(mean) if std.any() else mean
    changed = _per_row(changes, sample)
    step = replace(
        taken,
        next_sample=torch.where(changed, drawn.to(storage_dtype), taken.next_sample),
        mean=torch.where(changed, mean, taken.mean),
        std=torch.where(to_device(changes, sample.device), to_device(std.float(), sample.device), taken.std),
    )
    return step, prediction


def _per_row(weight: Tensor, sample: Tensor) -> Tensor:
    """[N] on the host -> on the device of the latents, to multiply them with; fp32 if it holds numbers."""
    row = weight if weight.dtype == torch.bool else weight.float()
    return to_device(row, sample.device).view((-1,) + (1,) * (sample.dim() - 1))
