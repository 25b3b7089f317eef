# SPDX-License-Identifier: Apache-2.0
"""Losses at forward points of whole batches, in fp64 and by the papers' formulas, without joint columns."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Row = Mapping[str, Any]
"""Inputs of one row without a batch dimension, its `group` and its `point`."""


def slow_loss(name: str, rows: Sequence[Row], config: Any) -> Tensor:
    """[] loss of a batch's rows, or for `dgpo` a number with the same gradient."""
    in_fp64 = [
        {key: value.double() if isinstance(value, Tensor) else value for key, value in row.items()} for row in rows
    ]
    return LOSSES[name](in_fp64, config)


def slow_row(values: Mapping[str, Tensor], config: Any) -> Tensor:
    """[] loss of one row of DiffusionNFT, from its inputs without a batch dimension; advantages are clamped at 5."""
    values = {name: value.double() for name, value in values.items()}
    share = max(0.0, min(1.0, max(-5.0, min(5.0, values["advantage"].item())) / 10 + 0.5))
    velocity, old, beta = values["velocity"], values["old_velocity"], config.beta

    def error(implicit: Tensor) -> Tensor:
        wrong = values["noisy"] - values["sigma"] * implicit - values["clean"]
        return (wrong**2).mean() / max(1e-5, wrong.abs().mean().item())

    positive = error(beta * velocity + (1 - beta) * old)
    negative = error((1 + beta) * old - beta * velocity)
    policy = 5 * (share * positive + (1 - share) * negative) / beta
    return policy + config.kl_coef * torch.mean((velocity - values["reference_velocity"]) ** 2)


def _nft(rows: Sequence[Row], config: Any) -> Tensor:
    return torch.stack(
        [slow_row({k: v for k, v in row.items() if isinstance(v, Tensor)}, config) for row in rows]
    ).mean()


def _error(row: Row, velocity: str = "velocity") -> Tensor:
    return ((row[velocity] - (row["noise"] - row["clean"])) ** 2).mean()


POWERS = {"uniform": (1.0, 0), "t": (1.0, 1), "t**2": (1.0, 2), "huber": (0.5, 1)}
"""AWM's weighting -> powers of the error and of sigma in its log-prob; ghuber has its own."""


def _awm(rows: Sequence[Row], config: Any) -> Tensor:
    """With a weighting of `POWERS`, and uniform distances."""

    def log_prob(row: Row, velocity: str) -> Tensor:
        error, sigma = _error(row, velocity), row["sigma"]
        if config.weighting == "ghuber":
            return -(error**config.power) * sigma / config.power
        of_error, of_sigma = POWERS[config.weighting]
        return -(error**of_error) * sigma**of_sigma

    losses = []
    for row in rows:
        advantage = max(-5.0, min(5.0, row["advantage"].item())) / 5 * config.advantage_max
        ratio = torch.exp(log_prob(row, "velocity") - log_prob(row, "old_velocity").detach())
        bounded = min(max(ratio.item(), 1 - config.clip_range), 1 + config.clip_range)
        loss = (
            -advantage * ratio if -advantage * ratio.item() >= -advantage * bounded else 0 * ratio - advantage * bounded
        )
        average = "old" if "old" in config.copies else "ema"
        for policy, coef in (("reference", config.kl_coef), (average, config.ema_kl_coef)):
            if coef > 0:
                loss = loss + coef * ((row["velocity"] - row[f"{policy}_velocity"]) ** 2).mean()
        losses.append(loss)
    return torch.stack(losses).mean()


def _together(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault((row["group"], row["point"]), []).append(row)
    return list(found.values())


def _dgpo(rows: Sequence[Row], config: Any) -> Tensor:
    """Sum over groups of -logsigmoid(-S) G / beta, per row of the batch; clipped rows count without gradient in S."""
    total = torch.zeros((), dtype=torch.float64)
    for together in _together(rows):
        logit = torch.zeros((), dtype=torch.float64)
        for row in together:
            advantage, error = max(-5.0, min(5.0, row["advantage"].item())), _error(row)
            ratio = math.exp(_error(row, "old_velocity").item() - error.item())
            if (advantage > 0 and ratio > 1 + config.clip) or (advantage <= 0 and ratio < 1 - config.clip):
                error = error.detach()
            logit = logit + config.beta / len(together) * advantage * (error - _error(row, "reference_velocity"))
        total = total - torch.nn.functional.logsigmoid(-logit) * len(together) / config.beta
    return total / len(rows)


def _dpo(rows: Sequence[Row], config: Any) -> Tensor:
    losses = []
    for one, other in _together(rows):
        best, worst = (one, other) if one["advantage"] > other["advantage"] else (other, one)
        gains = [_error(row) - _error(row, "reference_velocity") for row in (best, worst)]
        losses.append(-torch.nn.functional.logsigmoid(-config.beta / 2 * (gains[0] - gains[1])))
    return torch.stack(losses).mean()


LOSSES: dict[str, Callable[[Sequence[Row], Any], Tensor]] = {
    "diffusion_nft": _nft,
    "awm": _awm,
    "awm_off_policy": _awm,
    "dgpo": _dgpo,
    "online_dpo": _dpo,
    "offline_dpo": _dpo,
}
