# SPDX-License-Identifier: Apache-2.0
"""Losses of recorded steps of whole batches, in fp64 and by the papers' formulas, without joint columns."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Row = Mapping[str, Any]
"""Inputs of one row without a batch dimension, fp64, and its `sample`."""


def slow_loss(name: str, inputs: Mapping[str, Tensor], config: Any, rows: Sequence[int]) -> Tensor:
    """[] loss of these rows of a batch's inputs [N, ...]."""
    columns = {
        key: column.double() if column.is_floating_point() else column.tolist() for key, column in inputs.items()
    }
    return LOSSES[name]([{key: column[row] for key, column in columns.items()} for row in rows], config)


def clamped(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def _advantage(row: Row, config: Any) -> float:
    return clamped(row["advantage"].item(), -config.advantage_clip, config.advantage_clip)


def _clip(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    """PPO's clip, a case for each side: a row that is cut has no gradient."""
    bounded = clamped(ratio.item(), low, high)
    is_cut = -advantage * ratio.item() < -advantage * bounded
    return 0 * ratio - advantage * bounded if is_cut else -advantage * ratio


def _bounds(config: Any) -> tuple[float, float]:
    above = config.clip_range if config.clip_range_high is None else config.clip_range_high
    return 1 - config.clip_range, 1 + above


def _ratio_to(row: Row, column: str) -> float:
    return math.exp(row["log_prob"].item() - row[column].item())


def _flow_grpo(row: Row, config: Any) -> Tensor:
    ratio = torch.exp(row["log_prob"] - row["old_log_prob"])
    return _clip(ratio, _advantage(row, config), *_bounds(config))


def _grpo_guard(row: Row, config: Any) -> Tensor:
    drift = ((row["mean"] - row["old_mean"]) ** 2).mean() / (2 * row["std"] ** 2)
    ratio = torch.exp((row["log_prob"] - row["old_log_prob"] + drift) * row["std"])
    return _clip(ratio, _advantage(row, config), *_bounds(config)) / (row["sigma"] - row["sigma_next"])


def _flow_dppo(row: Row, config: Any) -> Tensor:
    divergence = ((row["mean"] - row["old_mean"]) ** 2).mean().item() / (2 * row["std"].item() ** 2)
    ratio, advantage = torch.exp(row["log_prob"] - row["old_log_prob"]), row["advantage"].item()
    moves_on = (advantage > 0 and ratio.item() > 1) or (advantage < 0 and ratio.item() < 1)
    return 0 * ratio if divergence >= config.kl_threshold and moves_on else -advantage * ratio


def step_weight(row: Row) -> float:
    """LongCat-Video's weight of a step."""
    sigma = row["sigma"].item()
    end = 1 - (row["sigma_max"].item() if sigma == 1 else sigma)
    return math.sqrt(sigma / end) / math.sqrt(sigma - row["sigma_next"].item())


def _longcat(row: Row, config: Any) -> Tensor:
    return step_weight(row) * _flow_grpo(row, config)


def _tis(row: Row, config: Any) -> Tensor:
    weight = clamped(_ratio_to(row, "behaviour_log_prob"), config.low, config.high)
    return -weight * _advantage(row, config) * row["log_prob"]


def _cispo(row: Row, config: Any) -> Tensor:
    ratio, advantage = _ratio_to(row, "behaviour_log_prob"), _advantage(row, config)
    if config.mask and ((advantage > 0 and ratio > 1 + config.high) or (advantage < 0 and ratio < 1 - config.low)):
        return 0 * row["log_prob"]
    weight = clamped(ratio, 1 - config.low, 1 + config.high)
    return -weight * _advantage(row, config) * row["log_prob"]


def _weighted_topr(row: Row, config: Any) -> Tensor:
    weight = getattr(config, "positive_weight", 1.0)
    if row["reward"].item() <= config.threshold:
        weight = getattr(config, "negative_weight", 1.0) * min(_ratio_to(row, "behaviour_log_prob"), 1.0)
    return -weight * _advantage(row, config) * row["log_prob"]


def _decoupled_ppo(row: Row, config: Any) -> Tensor:
    weight = min(math.exp(row["old_log_prob"].item() - row["behaviour_log_prob"].item()), config.cap)
    return weight * _flow_grpo(row, config)


def _kimi(row: Row, config: Any) -> Tensor:
    square = (row["log_prob"] - row["behaviour_log_prob"]) ** 2
    return -_advantage(row, config) * row["log_prob"] + config.tau / 2 * square


def _reinforce(row: Row, config: Any) -> Tensor:
    return -_advantage(row, config) * row["log_prob"]


def _opd(row: Row, config: Any) -> Tensor:
    distance = ((row["velocity"] - row["teacher_velocity"]) ** 2).mean()
    if config.kind == "kl":
        distance = ((row["mean"] - row["teacher_mean"]) ** 2).mean() / (2 * row["s"] ** 2)
    return distance


def _gspo(rows: Sequence[Row], config: Any) -> Tensor:
    """One graph through all log-probs of a trajectory, which counts once for each of its rows."""
    trajectories: dict[Any, list[Row]] = {}
    for row in rows:
        trajectories.setdefault(row["sample"], []).append(row)
    losses = []
    for own in trajectories.values():
        ratio = torch.stack([row["log_prob"] - row["behaviour_log_prob"] for row in own]).mean().exp()
        losses += [_clip(ratio, _advantage(own[0], config), *_bounds(config))] * len(own)
    return torch.stack(losses).mean()


def _mean_of(per_row: Callable[[Row, Any], Tensor]) -> Callable[[Sequence[Row], Any], Tensor]:
    return lambda rows, config: torch.stack([per_row(row, config) for row in rows]).mean()


LOSSES: dict[str, Callable[[Sequence[Row], Any], Tensor]] = {
    "cispo": _mean_of(_cispo),
    "dance_grpo": _mean_of(_flow_grpo),
    "decoupled_ppo": _mean_of(_decoupled_ppo),
    "flow_dppo": _mean_of(_flow_dppo),
    "flow_grpo": _mean_of(_flow_grpo),
    "grpo_guard": _mean_of(_grpo_guard),
    "gspo": _gspo,
    "kimi": _mean_of(_kimi),
    "longcat": _mean_of(_longcat),
    "opd": _mean_of(_opd),
    "reinforce": _mean_of(_reinforce),
    "tis": _mean_of(_tis),
    "topr": _mean_of(_weighted_topr),
    "weighted_topr": _mean_of(_weighted_topr),
}
