# SPDX-License-Identifier: Apache-2.0
"""`sa`: SA-Solver, predictor and corrector of order 2 with noise, for samples that are noised again for training.

With T = 1 + tau², alpha = 1 - sigma, h = lambda' - lambda and h_prev the step of lambda before it:

    x' = A x + alpha' (1 - e^(-T h)) x_0 + alpha' T h² / (2 h_prev) (x_0 - x_0_prev) + sigma' sqrt(1 - e^(-2 tau² h)) z
    A = e^(-tau² h) sigma' / sigma

and the corrector moves x, once the network has been evaluated at it, with h and T of the step that led to x:

    d = alpha T (h / 2 (x_0 - x_0_prev) - h² / (2 h_prev) (x_0_prev - x_0_prev2))

tau of a step belongs to the sigma where it ends. The second step is not corrected, and the one that ends at sigma 0
returns x_0. Where lambda_prev is infinite, after sigma 1, the term of h_prev is 0; published code moves that sigma to
0.999, and halves the last one above 0.

Source: SA-Solver (arXiv 2309.05019) with its rescaling for few steps, as in the code of AWM (arXiv 2509.25050).
"""

import torch
from torch import Tensor

from verl_digen.algorithms.solvers.terms import Schedule, Terms, log_ratio


def sa(schedule: Schedule) -> Terms:
    """Terms of a step."""
    start, end, is_last = schedule.start, schedule.end, schedule.end == 0
    tau_squared = schedule.noise.at(end).square()
    # e^(-h), without infinite lambdas
    shrink = (1 - start) * end / (start * (1 - end))
    kept = shrink.pow(tau_squared) * end / start
    newest = torch.where(
        (schedule.count >= 1) & ~is_last,
        _alpha_t(end, tau_squared) * _step(start, end).square() / (2 * _step(schedule.before, start)),
        0.0,
    )
    corrected, older = _corrector(schedule)
    return Terms(
        newest=newest + kept * corrected,
        older=kept * older,
        x_weight=kept - end / start,
        clean_weight=(1 - end) * (1 - shrink.pow(1 + tau_squared)) - (1 - end / start),
        std=end * (1 - shrink.pow(2 * tau_squared)).sqrt(),
    )


def _corrector(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Weights of x_0 - x_0_prev and of x_0_prev - x_0_prev2 in d, [N] fp64."""
    alpha_t = _alpha_t(schedule.start, schedule.noise.at(schedule.start).square())
    step = _step(schedule.before, schedule.start)
    corrects = schedule.count >= 2
    newest = torch.where(corrects, alpha_t * step / 2, 0.0)
    older = torch.where(corrects, -alpha_t * step.square() / (2 * _step(schedule.earlier, schedule.before)), 0.0)
    return newest, older


def _alpha_t(sigma: Tensor, tau_squared: Tensor) -> Tensor:
    return (1 - sigma) * (1 + tau_squared)


def _step(start: Tensor, end: Tensor) -> Tensor:
    """Step of lambda between two sigmas; infinite if one is 1 or 0."""
    return log_ratio(end) - log_ratio(start)
