# SPDX-License-Identifier: Apache-2.0
"""`unipc`: UniPC of order 2 with B(h) = e^h - 1 (bh2), for predictions of x_0; named by Wan's checkpoints.

Its predictor is `dpm2`. Its corrector replaces x, once the network has been evaluated at it, by x + d:

    d = k (r_1 (x_0 - x_0_prev) + (r_0 - ½) / q (x_0_prev - x_0_prev2))      k = 1 - sigma / sigma_prev, q = h_prev / h

with h = lambda - lambda_prev here; r_0, r_1 solve UniPC's two order conditions. After one prediction d = ½ k
(x_0 - x_0_prev). The step that follows scales d by sigma' / sigma.

Source: UniPC (arXiv 2302.04867); order, corrector and last step as in diffusers' UniPCMultistepScheduler.
"""

import torch
from torch import Tensor

from verl_digen.algorithms.solvers.dpm2 import second_order
from verl_digen.algorithms.solvers.terms import Schedule, Terms, log_ratio


def unipc(schedule: Schedule) -> Terms:
    """Terms of a step: the predictor's, and the corrector's scaled by sigma' / sigma."""
    newest, older = _corrector(schedule)
    scale = schedule.end / schedule.start
    return Terms(second_order(schedule, schedule.before < 1) + scale * newest, scale * older)


def _corrector(schedule: Schedule) -> tuple[Tensor, Tensor]:
    """Weights of x_0 - x_0_prev and of x_0_prev - x_0_prev2 in d, [N] fp64."""
    corrects, has_order = schedule.count >= 1, schedule.count >= 2
    share = torch.where(corrects, 1 - schedule.start / torch.where(corrects, schedule.before, 1.0), 0.0)
    now, last, earlier = (
        log_ratio(torch.where(has_order, sigma, other))
        for sigma, other in ((schedule.start, 0.25), (schedule.before, 0.5), (schedule.earlier, 0.75))
    )
    step = now - last
    ratio = (last - earlier) / step  # infinite after sigma 1
    decay = torch.expm1(-step)
    first = -1 / step - 1 / decay
    second = 2 * ((-decay / step - 1) / -step - 0.5) / decay
    of_earlier = (first - second) / (1 + ratio)
    newest = torch.where(has_order, first - of_earlier, 0.5)
    older = torch.where(has_order, (of_earlier - 0.5) / ratio, 0.0)
    return share * newest, share * older
