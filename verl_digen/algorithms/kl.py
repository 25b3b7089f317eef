# SPDX-License-Identifier: Apache-2.0
"""KL to the reference policy over rows, by kind. The caller multiplies it by its beta and adds it to the loss.

| kind | per row |
| --- | --- |
| `flow_grpo` | mean[(μ - μ_ref)²] / (2 s²), s the noise rate of the step (`sde.noise_rate`) |
| `exact` | mean[(μ - μ_ref)²] / (2 std²), the KL of the two Gaussians per latent dim |
| `velocity` | mean[(v - v_ref)²] |
| `longcat` | k² mean[(μ - μ_ref)²] / (2 std²), k the weight of the step in the loss `longcat`; see `LAWS` |

Published betas are for `flow_grpo`: 0.04 (OCR, GenEval), 0.01 (PickScore), 0.004 (Wan); and 3e-4 for `longcat` (Wan).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from verl_digen.algorithms.rows import LossInputs, LossOutput, Metric
from verl_digen.algorithms.sde import STEP_WEIGHT_LAWS, gaussian_kl, latent_mean, step_weight

Kind = tuple[tuple[str, ...], tuple[str, ...], Callable[[LossInputs], Tensor]]
"""(columns [N] it needs, latents [N, ...] it needs, divergence per row [N])."""


def kl_loss(kind: str, inputs: Mapping[str, Tensor]) -> LossOutput:
    """KL of N rows, as their share of the logical batch's mean; also its metric `kl`.

    `inputs` holds what `kl_inputs(kind)` lists (latents of x'; columns as `SdeStep.std` and `sde.noise_rate`), and
    `mask` and `num_rows` as for `policy_loss`. ValueError for an input that is missing or misshapen.
    """
    columns, latents, divergence = KINDS[kind]
    rows = LossInputs.check(f"KL kind {kind!r}", inputs, columns=columns, latents=latents)
    loss = rows.mean(divergence(rows))
    return LossOutput(loss, {"kl": Metric(loss.detach())})


def kl_inputs(kind: str) -> tuple[str, ...]:
    """The inputs that KL `kind` needs."""
    columns, latents, _ = KINDS[kind]
    return (*columns, *latents)


def _flow_grpo(rows: LossInputs) -> Tensor:
    return gaussian_kl(rows["mean"], rows["reference_mean"], rows["noise_rate"])


def _exact(rows: LossInputs) -> Tensor:
    return gaussian_kl(rows["mean"], rows["reference_mean"], rows["std"])


def _velocity(rows: LossInputs) -> Tensor:
    return latent_mean((rows["velocity"] - rows["reference_velocity"]).square())


def _longcat(rows: LossInputs) -> Tensor:
    weight = torch.where(rows.is_row, step_weight(rows["sigma"], rows["sigma_next"], rows["sigma_max"]), 0.0)
    return weight.square() * _exact(rows)


KINDS: dict[str, Kind] = {
    "flow_grpo": (("noise_rate",), ("mean", "reference_mean"), _flow_grpo),
    "exact": (("std",), ("mean", "reference_mean"), _exact),
    "velocity": ((), ("velocity", "reference_velocity"), _velocity),
    "longcat": (("std", "sigma", "sigma_next", "sigma_max"), ("mean", "reference_mean"), _longcat),
}
LAWS = {"longcat": STEP_WEIGHT_LAWS}
"""kind -> values of `digen.sde.law` that it is defined for; others are defined for all."""
