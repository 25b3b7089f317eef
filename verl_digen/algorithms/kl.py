# SPDX-License-Identifier: Apache-2.0
"""KL to the reference policy over rows, by kind. The caller multiplies it by its beta and adds it to the loss.

| kind | per row |
| --- | --- |
| `flow_grpo` | mean[(μ - μ_ref)²] / (2 s²), s = std / sqrt(-dt) |
| `exact` | mean[(μ - μ_ref)²] / (2 std²), the KL of the two Gaussians per latent dim |
| `velocity` | mean[(v - v_ref)²] |

Published betas are for `flow_grpo`: 0.04 (OCR, GenEval), 0.01 (PickScore), 0.004 (Wan).
"""

from collections.abc import Callable, Mapping

from torch import Tensor

from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import latent_mean


def kl_loss(kind: str, inputs: Mapping[str, Tensor]) -> LossOutput:
    """KL of N rows, as their share of the logical batch's mean; also its metric `kl`.

    Args:
        inputs: what `KINDS[kind]` lists: latents `mean` and `ref_mean` of x', or `velocity` and
            `ref_velocity`; columns `std` (as `SdeStep.std`) and `dt` = sigma' - sigma < 0. `mask` and
            `num_rows` as in `losses.policy_loss`.

    Raises:
        ValueError: unknown kind; an input is missing or misshapen.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown KL kind {kind!r}; known kinds: {', '.join(KINDS)}")
    columns, latents, divergence = KINDS[kind]
    rows = LossInputs.check(f"KL kind {kind!r}", inputs, columns=columns, latents=latents)
    loss = rows.mean(divergence(rows))
    return LossOutput(loss, {"kl": loss.detach()})


def _flow_grpo(rows: LossInputs) -> Tensor:
    return _exact(rows) * -rows["dt"]


def _exact(rows: LossInputs) -> Tensor:
    return latent_mean((rows["mean"] - rows["ref_mean"]).square()) / (2 * rows["std"].square())


def _velocity(rows: LossInputs) -> Tensor:
    return latent_mean((rows["velocity"] - rows["ref_velocity"]).square())


KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[LossInputs], Tensor]]] = {
    "flow_grpo": (("std", "dt"), ("mean", "ref_mean"), _flow_grpo),
    "exact": (("std",), ("mean", "ref_mean"), _exact),
    "velocity": ((), ("velocity", "ref_velocity"), _velocity),
}
"""kind -> (columns [N] it needs, latents [N, ...] it needs, divergence per row [N])."""
