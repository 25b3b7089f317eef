# SPDX-License-Identifier: Apache-2.0
"""`dpm2`: second-order multistep DPM-Solver++ (2M, midpoint).

    newest = ½ (1 - sigma' / sigma) h / h_prev        h = lambda' - lambda, h_prev = lambda - lambda_prev

It is 0 where a lambda is infinite: in the step that ends at sigma 0, and in the one after sigma 1.

Source: DPM-Solver++ (arXiv 2211.01095), for flow matching as in DiffusionNFT and MixGRPO.
"""

import torch
from torch import Tensor

from verl_digen.algorithms.sde import SIGMA_ONE_TOLERANCE
from verl_digen.algorithms.solvers.terms import Schedule, Terms, log_ratio


def dpm2(schedule: Schedule) -> Terms:
    """Terms of a step; a first-order one is Euler's."""
    return Terms(second_order(schedule, schedule.before < 1 - SIGMA_ONE_TOLERANCE))


def second_order(schedule: Schedule, is_finite: Tensor) -> Tensor:
    """Weight of x_0 - x_0_prev, [N] fp64; 0 without a prediction, and where lambda_prev is not `is_finite`."""
    has_order = (schedule.count >= 1) & is_finite & (schedule.end > 0)
    sigmas = (schedule.before, schedule.start, schedule.end)
    last, now, then = (log_ratio(torch.where(has_order, sigma, 0.5)) for sigma in sigmas)
    ratio = (then - now) / torch.where(has_order, now - last, 1.0)
    return torch.where(has_order, 0.5 * (1 - schedule.end / schedule.start) * ratio, 0.0)
