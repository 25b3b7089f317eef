# SPDX-License-Identifier: Apache-2.0
"""ODE solvers for the steps that are not stochastic, and the one denoising step that all samplers take.

    x' = x + v (sigma' - sigma) + c (x_0 - x_0_prev)        x_0 = x - sigma v, of this step and of the one before

| solver | c |
| --- | --- |
| `euler` | 0 |
| `dpm2` | ½ (1 - sigma' / sigma) h / h_prev: the second-order multistep DPM-Solver++ (2M, midpoint) |

Both take one forward a step. h = lambda' - lambda and h_prev = lambda - lambda_prev, lambda = ln((1 - sigma) / sigma).
DDIM without noise is no solver of its own: for flow matching (1 - sigma') x_0 + sigma' eps, with
eps = x + (1 - sigma) v, is Euler's step. UniPC, which Wan's checkpoints name, is not there: their sigmas are used,
with these solvers.

* The first step of a run of ODE steps is Euler's (c = 0), and so is the one that ends at sigma 0, and the one after
  sigma 1, where lambda is infinite.
* A stochastic step neither reads nor leaves a prediction: it is `sde_step`, and a run of ODE steps begins after it.
* c is computed on the host in fp64 from schedule numbers in fp32, like the coefficients of `sde_step`.

Invariants (tests/algorithms/test_solvers.py): `euler` is bitwise `sde_step`; stochastic rows are bitwise those of
`euler`; `dpm2` is diffusers' DPMSolverMultistepScheduler, and its error falls with the square of the step.

Sources: DPM-Solver++ (arXiv 2211.01095), for flow matching as in DiffusionNFT and MixGRPO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from verl_digen.algorithms.sde import SIGMA_ONE_TOLERANCE, SdeStep, sde_step
from verl_digen.transfers import to_device

SOLVERS = ("euler", "dpm2")
"""Values of `digen.sampling.solver`."""


@dataclass(frozen=True)
class Prediction:
    """Prediction of x_0 at the last step of N rows."""

    clean: Tensor
    """[N, ...] fp32."""
    sigma: Tensor
    """[N] fp64 on the host: noise level at which it was made; 1 in rows that took a stochastic step."""

    def rows(self, chosen: Sequence[int]) -> Prediction:
        """The prediction of the rows `chosen`, in that order."""
        return Prediction(self.clean[list(chosen)], self.sigma[list(chosen)])


def denoise_step(
    velocity: Tensor,
    sample: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    *,
    solver: str,
    is_sde: Sequence[bool],
    previous: Prediction | None,
    law: str,
    noise_level: float | Tensor,
    sigma_max: float | Tensor,
    noise: Tensor,
    storage_dtype: torch.dtype,
) -> tuple[SdeStep, Prediction | None]:
    """Take one denoising step of N rows: `sde_step` where `is_sde`, else a step of `solver`.

    Args:
        velocity, sample: [N, ...]. sigma, sigma_next: [N] on the host.
        is_sde: N entries.
        previous: result of the step before; None at the first step.
        law, noise_level, sigma_max, noise, storage_dtype: see `sde_step`. `noise_level` is a number or [N], `noise`
            [N, ...]; neither is read in rows that are not stochastic.

    Returns:
        The step, and the prediction that the next one reads (None with `euler`, which needs none).

    Raises:
        ValueError: unknown solver, or as `sde_step`.
    """
    if solver not in SOLVERS:
        raise ValueError(f"unknown ODE solver {solver!r}; known solvers: {', '.join(SOLVERS)}")
    stochastic = torch.tensor(is_sde)
    taken = sde_step(
        velocity,
        sample,
        sigma,
        sigma_next,
        law=law,
        noise_level=stochastic.double() * noise_level,
        sigma_max=sigma_max,
        noise=noise,
        storage_dtype=storage_dtype,
    )
    if solver == "euler":
        return taken, None
    per_row = (-1,) + (1,) * (sample.dim() - 1)
    start, end = sigma.double(), sigma_next.double()
    clean = sample.float() - to_device(start.float(), sample.device).view(per_row) * velocity.float()
    prediction = Prediction(clean, torch.where(stochastic, 1.0, start))
    if previous is None:
        return taken, prediction
    weight = torch.where(stochastic, 0.0, _second_order(previous.sigma, start, end))
    if not weight.any():
        return taken, prediction
    weight_N = to_device(weight.float(), sample.device).view(per_row)
    mean = taken.mean + weight_N * (clean - previous.clean)
    is_ode = to_device(weight != 0, sample.device).view(per_row)
    outcome = torch.where(is_ode, mean.to(storage_dtype), taken.next_sample)
    return replace(taken, next_sample=outcome, mean=torch.where(is_ode, mean, taken.mean)), prediction


def _second_order(before: Tensor, start: Tensor, end: Tensor) -> Tensor:
    """c of `dpm2`, [N] fp64; 0 where a lambda is infinite. Sigmas of the step before, of this one and of its end."""
    has_order = (before < 1 - SIGMA_ONE_TOLERANCE) & (end > 0)
    last, now, then = (_log_ratio(torch.where(has_order, sigma, 0.5)) for sigma in (before, start, end))
    ratio = (then - now) / torch.where(has_order, now - last, 1.0)
    return torch.where(has_order, 0.5 * (1 - end / start) * ratio, 0.0)


def _log_ratio(sigma: Tensor) -> Tensor:
    """lambda = ln((1 - sigma) / sigma)."""
    return torch.log1p(-sigma) - torch.log(sigma)
