# SPDX-License-Identifier: Apache-2.0
"""Rewards of groups -> advantages: (reward - mean of the group) / scale. A sample counts once, however many of its
timesteps are trained.

Computed in fp64, since an eps of 1e-8 would blow fp32 rounding up to whole advantages. Not clamped here: the loss does
that (`LossConfig.advantage_bound`).

Invariants: a group's advantages sum to 0, and are exactly 0 where its rewards are all equal, for every scale and eps. A
single sample has spread 0, also with ddof 1, where its variance would be 0 / 0.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SCALES = ("batch", "group", "max_group", "none")


def group_advantages(
    rewards: Tensor, groups: Sequence[Hashable], *, scale: str = "batch", ddof: int = 0, eps: float = 1e-4
) -> Tensor:
    """Advantages [B] fp32, on the device of the rewards [B]; samples with equal ids in `groups` form a group, in any
    order.

    Flow-GRPO: the defaults. DanceGRPO: scale "group", ddof 1, eps 1e-8. GenRL: scale "max_group". ValueError for a NaN
    or infinite reward, named by its index, a wrong shape, and a scale, ddof or eps that `advantage_scale` does not
    know.
    """
    values, members = _grouped(rewards, groups)
    divisor = advantage_scale(rewards, groups, scale=scale, ddof=ddof, eps=eps)
    advantages = torch.zeros_like(values)
    for samples in members.values():
        if _has_spread(values[samples]):
            advantages[samples] = (values[samples] - values[samples].mean()) / divisor[samples]
    return advantages.to(rewards.device, torch.float32)


def compute_advantage(scores: Tensor, uids: Sequence[Hashable], **scaling: Any) -> Tensor:
    """Advantages of B samples by verl's name, fp32 in the shape of `scores`, [B] or [B, 1] as in `rm_scores`.
    `scaling`, and errors: as `group_advantages`."""
    rewards = scores.squeeze(1) if scores.dim() == 2 and scores.shape[1] == 1 else scores
    return group_advantages(rewards, list(uids), **scaling).reshape(scores.shape)


def advantage_scale(
    rewards: Tensor, groups: Sequence[Hashable], *, scale: str = "batch", ddof: int = 0, eps: float = 1e-4
) -> Tensor:
    """Divisor of each sample's centred reward, [B] fp64 on the CPU. Errors as `group_advantages`.

    `batch`: std of all rewards + eps. `group`: std of the sample's group + eps. `max_group`: the largest group std +
    eps. `none`: 1. `ddof` is 0 for the population std, 1 for the sample std. Except under `group` all entries are
    equal, so advantages of scale "none" can be trained on and the gradient divided later, when all rewards are known.
    """
    values, members = _grouped(rewards, groups)
    if scale not in SCALES:
        raise ValueError(f"unknown advantage scale {scale!r}; known scales: {', '.join(SCALES)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof must be 0 (population std) or 1 (sample std), got {ddof}")
    if not eps >= 0:
        raise ValueError(f"eps must be >= 0, got {eps}")
    if scale == "none":
        return torch.ones_like(values)
    if scale == "batch":
        return torch.full_like(values, _std(values, ddof) + eps)
    divisor = torch.empty_like(values)
    for samples in members.values():
        divisor[samples] = _std(values[samples], ddof) + eps
    return divisor if scale == "group" else torch.full_like(values, divisor.max().item())


def effective_samples(advantages: Tensor) -> float:
    """Number of samples of equal weight that these advantages [B] amount to: (sum of |A|)^2 / sum of A^2, 0 to B.

    Example:
        effective_samples(torch.tensor([1.0, -1.0, 0.0, 0.0]))  # 2.0
    """
    weights = advantages.double().abs()
    return (weights.sum().square() / weights.square().sum()).item() if bool(weights.any()) else 0.0


def combined_advantages(
    parts: Mapping[str, Sequence[float]], weights: Mapping[str, float], *, ddof: int = 0, eps: float = 1e-4
) -> list[float]:
    """GDPO's combination of several rewards (name -> values), for the samples of one group: sum over rewards k of w_k
    (r_k - mean of the group) / (std of the group + eps), [G].

    Weights are not normalised. GDPO then divides by the std of the batch: these values as rewards, with scale "batch".
    Rewards of weight 0 are left out, so one that some samples lack must have it.
    """
    total: Tensor | None = None
    for name, weight in weights.items():
        if weight != 0:
            values = torch.tensor(parts[name], dtype=torch.float64)
            divisor = advantage_scale(values, [0] * len(values), scale="group", ddof=ddof, eps=eps)
            centred = values - values.mean() if _has_spread(values) else torch.zeros_like(values)
            total = weight * centred / divisor if total is None else total + weight * centred / divisor
    if total is None:
        raise ValueError(f"a weight must differ from 0, got {dict(weights)}; nothing would be learnt")
    return total.tolist()


def _grouped(rewards: Tensor, groups: Sequence[Hashable]) -> tuple[Tensor, dict[Hashable, list[int]]]:
    """The rewards, [B] fp64 on the CPU, and the indices of each group's samples."""
    if rewards.dim() != 1 or len(rewards) == 0:
        raise ValueError(f"reward must have shape [B] with B >= 1, got {list(rewards.shape)}")
    values = rewards.detach().cpu().double()
    bad = (~values.isfinite()).nonzero().flatten().tolist()
    if bad:
        raise ValueError(
            f"reward must be finite, got {values[bad[0]].item()} at index {bad[0]} "
            f"({len(bad)} of {len(values)} are not finite); a scorer that fails should raise"
        )
    if len(values) != len(groups):
        raise ValueError(f"every reward needs a group id, got {len(values)} rewards and {len(groups)} ids")
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return values, members


def _has_spread(values: Tensor) -> bool:
    return bool(values.min() < values.max())


def _std(values: Tensor, ddof: int) -> float:
    return values.std(correction=ddof).item() if _has_spread(values) else 0.0
