# SPDX-License-Identifier: Apache-2.0
"""One stochastic step of a flow-matching sampler, and its log-density.

Notation: x = (1 - sigma) x_0 + sigma eps; velocity v = dx/d(sigma), the network's output; a step goes from sigma down
to sigma'; dt = sigma' - sigma < 0; eta = noise level. Under every law a row's step has one form, with five numbers:

    mean = a x + b v        x' = mean + std * noise        log-density of x' = offset - scale * mean((x' - mean)²)

- Rows are independent: each has its own sigma, sigma' and eta, so one call serves a tile of mixed timesteps.
- Schedule numbers (sigma, sigma', eta, sigma_max) are read as fp32; the five are computed from them on the host in fp64
  and rounded once, so they are the same for every accelerator. Latents are computed in fp32. Keep schedule tensors on
  the CPU: on a device each of them costs a synchronisation. Tuples of numbers are looked up fastest.
- A row whose std is 0 (eta = 0; under law cps also sigma' = 0) is a deterministic step and has no density. Taking it
  records the log-prob 0.0, a placeholder; asking to score it is an error.

Invariants: scoring the `next_sample` of a step that was taken gives its log-prob again, bitwise for equal inputs. eta =
0 is the ODE step x + v dt under every law. No NaN: ValueError if a law is not defined for its inputs.

Sources: Flow-GRPO (flow, cps), LongCat-Video (flow_clipped), DanceGRPO (dance).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from verl_digen.hardware.transfers import to_device

FLOW_CLIPPED_MAX_STD = 0.45
"""Largest std of a step under law flow_clipped (LongCat-Video)."""

Numbers = float | tuple[float, ...]
"""A number, or one of each row."""

SIGMA_ONE_TOLERANCE = 2e-6
"""A sigma closer to 1 counts as 1: time shifts in fp32 miss it by an ulp, and law flow has a pole there."""


@dataclass(frozen=True)
class SdeStep:
    """A step of N rows that was taken or scored."""

    next_sample: Tensor
    """[N, ...] x': in the storage dtype (fp32 if none was named) when taken, as given when scored."""
    log_prob: Tensor
    """[N] fp32 log-density of x', its mean over the latent dims; 0.0 where the step was deterministic.

    Differentiable in the velocity through `mean`; x' counts as a constant. Law cps leaves out variance and
    constants.
    """
    mean: Tensor
    """[N, ...] fp32 mean of x'."""
    std: Tensor
    """[N] fp32 standard deviation of x', sqrt(-dt) included; 0.0 where the step was deterministic."""


def sde_step(
    velocity: Tensor,
    sample: Tensor,
    sigma: Tensor | Numbers,
    sigma_next: Tensor | Numbers,
    *,
    law: str,
    noise_level: Tensor | Numbers,
    sigma_max: Tensor | Numbers,
    next_sample: Tensor | None = None,
    noise: Tensor | None = None,
    storage_dtype: torch.dtype | None = None,
) -> SdeStep:
    """Take one denoising step (`noise` given; zeros give the mean), or score one (`next_sample` given).

    Args:
        velocity, sample: [N, ...] v and x, of any float dtype; `noise` and `next_sample`, the recorded x', likewise.
        sigma, sigma_next: [N], 1 >= sigma > sigma' >= 0. Padding rows need a valid step too.
        law: a key of `LAWS`.
        noise_level: eta >= 0, a number or [N]; at most 1 under law cps.
        sigma_max: the schedule's second sigma, `sigmas[1]`, a number or [N]. Laws flow and flow_clipped put it in place
            of sigma where that is 1, the pole of their noise.
        storage_dtype: the dtype in which x' will be kept. A step that is taken rounds x' to it *before* computing the
            log-prob, so that scoring the stored x' sees the same numbers. A recorded x' is rounded already.

    Raises:
        ValueError: unknown law; both or neither of `noise` and `next_sample`; a shape or number outside the above; a
            deterministic row among those to score.
    """
    if law not in LAWS:
        raise ValueError(f"unknown SDE law {law!r}; known laws: {', '.join(LAWS)}")
    if (noise is None) == (next_sample is None):
        raise ValueError("sde_step needs either noise (to take a step) or next_sample (to score a recorded one)")
    outcome = next_sample if noise is None else noise
    assert outcome is not None
    if not velocity.shape == sample.shape == outcome.shape:
        raise ValueError(
            f"velocity, sample and {'next_sample' if noise is None else 'noise'} must be of one shape, "
            f"got {list(velocity.shape)}, {list(sample.shape)}, {list(outcome.shape)}"
        )
    coefficients, deterministic_rows = _coefficients(
        law, len(sample), *map(_numbers, (sigma, sigma_next, noise_level, sigma_max))
    )
    if noise is None and deterministic_rows:
        raise ValueError(
            f"a deterministic step has no log-prob, got std 0 in rows {deterministic_rows} (noise_level 0, or "
            "law cps with sigma_next 0); score only steps of the trained window"
        )

    a, b, std, offset, scale = to_device(coefficients.clone(), sample.device)
    per_row = (-1,) + (1,) * (sample.dim() - 1)
    mean = a.view(per_row) * sample.float() + b.view(per_row) * velocity.float()
    if noise is not None:
        outcome = (mean + std.view(per_row) * noise.to(mean)).to(storage_dtype or torch.float32)
    squared_error = latent_mean((outcome.detach().to(mean) - mean).square())
    if deterministic_rows:  # it may be infinite, where x' overflows its dtype
        squared_error = squared_error.masked_fill(std == 0, 0.0)
    return SdeStep(outcome, offset - scale * squared_error, mean, std)


def latent_mean(latents: Tensor) -> Tensor:
    """[N, ...] -> [N], the mean over all latent dims."""
    return latents.reshape(len(latents), -1).mean(dim=1)


def gaussian_kl(mean: Tensor, other: Tensor, std: Tensor) -> Tensor:
    """KL divergence per latent dim of two Gaussians with one std: means [N, ...] and std [N] -> [N]."""
    return latent_mean((mean - other).square()) / (2 * std.square())


def noise_rate(law: str, std: Tensor, sigma: Tensor, sigma_next: Tensor) -> Tensor:
    """[N] s of steps with standard deviation `std` [N]. Laws flow, flow_clipped and dance are discretised SDEs, with
    std = s sqrt(sigma - sigma'). Under cps std does not come from the step's length, and s is std."""
    return std if law == "cps" else std * (sigma - sigma_next).rsqrt()


STEP_WEIGHT_LAWS = ("flow", "flow_clipped")
"""Laws whose gradients `step_weight` makes alike."""


def step_weight(sigma: Tensor, sigma_next: Tensor, sigma_max: Tensor) -> Tensor:
    """LongCat's weight of a step, sqrt(sigma / (1 - sigma)) / sqrt(sigma - sigma'), [N] each; `sigma_max` is put in
    place of a sigma of 1 in the denominator, as in law flow."""
    below_one = torch.where(sigma > 1 - SIGMA_ONE_TOLERANCE, sigma_max, sigma)
    return (sigma / (1 - below_one)).sqrt() / (sigma - sigma_next).sqrt()


def _numbers(value: Tensor | Numbers) -> Numbers:
    """Numbers to look up; a tensor's are fp32, and others are read as fp32 when they are looked up first."""
    return _hashable(value.float().tolist()) if isinstance(value, Tensor) else value


def _hashable(numbers: Any) -> Any:
    return tuple(map(_hashable, numbers)) if isinstance(numbers, list) else numbers


@lru_cache(maxsize=1024)
def _coefficients(
    law: str, num_rows: int, sigma: Numbers, sigma_next: Numbers, noise_level: Numbers, sigma_max: Numbers
) -> tuple[Tensor, list[int]]:
    """([5, N] fp32 on the host: a, b, std, offset and scale, the last two 0 where std is; numbers of the rows whose std
    is 0), kept: a run takes the same steps again and again. Copy them to change them."""
    with torch.inference_mode(False), torch.no_grad():
        schedule = _checked_schedule(num_rows, sigma, sigma_next, noise_level, sigma_max)
        transition, log_density = LAWS[law]
        a, b, std = transition(*schedule)
        deterministic = std.float() == 0
        density = (term.masked_fill(deterministic, 0.0) for term in log_density(std))
        values = torch.stack((a, b, std, *density)).float()
    return values, deterministic.nonzero().flatten().tolist()


def _checked_schedule(
    num_rows: int, sigma: Numbers, sigma_next: Numbers, noise_level: Numbers, sigma_max: Numbers
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """sigma, sigma', eta and sigma_max, each [N] fp64 on the host."""
    rows = []
    for name, value, may_be_scalar in (
        ("sigma", sigma, False),
        ("sigma_next", sigma_next, False),
        ("noise_level", noise_level, True),
        ("sigma_max", sigma_max, True),
    ):
        row = torch.tensor(value, dtype=torch.float32, device="cpu").double()
        if row.shape != (num_rows,) and not (may_be_scalar and row.dim() == 0):
            raise ValueError(f"{name} must have shape [{num_rows}], one per row of sample, got {list(row.shape)}")
        rows.append(row.expand(num_rows))
    start, end, eta, second = rows
    if not ((start <= 1 + SIGMA_ONE_TOLERANCE) & (start > end) & (end >= 0)).all():
        raise ValueError(
            "a step must go down, 1 >= sigma > sigma_next >= 0, "
            f"got sigma {start.tolist()} and sigma_next {end.tolist()}"
        )
    if not ((eta >= 0) & eta.isfinite()).all():
        raise ValueError(f"noise_level must be >= 0 and finite, got {eta.tolist()}")
    return start, end, eta, second


# Transitions: sigma, sigma', eta, sigma_max -> a, b, std; each [N] fp64.

Coefficients = tuple[Tensor, Tensor, Tensor]


def _flow_clipped(sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor) -> Coefficients:
    s_limit = FLOW_CLIPPED_MAX_STD / (sigma - sigma_next).sqrt()
    return _euler_maruyama(_flow_s(sigma, eta, sigma_max).minimum(s_limit), sigma, sigma_next)


def _euler_maruyama(s: Tensor, sigma: Tensor, sigma_next: Tensor) -> Coefficients:
    """dx = (v + s² / (2 sigma) (x + (1 - sigma) v)) d(sigma) + s dw: the ODE's marginals (Flow-GRPO)."""
    dt = sigma_next - sigma
    drift = s.square() / (2 * sigma) * dt
    return 1 + drift, dt + drift * (1 - sigma), s * (-dt).sqrt()


def _flow_s(sigma: Tensor, eta: Tensor, sigma_max: Tensor) -> Tensor:
    """eta sqrt(sigma / (1 - sigma)), with sigma_max in place of a sigma of 1 in the denominator."""
    is_one = sigma > 1 - SIGMA_ONE_TOLERANCE
    if not (~is_one | (sigma_max < 1 - SIGMA_ONE_TOLERANCE)).all():
        raise ValueError(
            "sigma_max must be the schedule's second sigma, below 1, where a step starts at sigma 1, "
            f"got {sigma_max.tolist()}"
        )
    return eta * (sigma / (1 - torch.where(is_one, sigma_max, sigma))).sqrt()


def _cps(sigma: Tensor, sigma_next: Tensor, eta: Tensor, sigma_max: Tensor) -> Coefficients:
    """Coefficients-preserving sampling: predicted x_0 and eps, mixed so that x' has the noise sigma'."""
    if (eta > 1).any():
        raise ValueError(f"noise_level must be <= 1 under law cps (1: all noise is new), got {eta.tolist()}")
    angle = eta * (math.pi / 2)
    clean, kept = 1 - sigma_next, sigma_next * angle.cos()
    return clean + kept, kept * (1 - sigma) - clean * sigma, sigma_next * angle.sin()


# Log-densities: std -> offset, scale; each [N] fp64.


def _gaussian(std: Tensor) -> tuple[Tensor, Tensor]:
    return -std.log() - 0.5 * math.log(2 * math.pi), 1 / (2 * std.square())


Transition = Callable[[Tensor, Tensor, Tensor, Tensor], Coefficients]
LogDensity = Callable[[Tensor], tuple[Tensor, Tensor]]

LAWS: dict[str, tuple[Transition, LogDensity]] = {
    "flow": (lambda sigma, end, eta, sigma_max: _euler_maruyama(_flow_s(sigma, eta, sigma_max), sigma, end), _gaussian),
    "flow_clipped": (_flow_clipped, _gaussian),
    "dance": (lambda sigma, end, eta, sigma_max: _euler_maruyama(eta, sigma, end), _gaussian),
    "cps": (_cps, lambda std: (torch.zeros_like(std), torch.ones_like(std))),
}
"""law -> (transition, log-density). Ratios under cps are on another scale than the Gaussian ones, and so are
the clip ranges that suit them."""
