# SPDX-License-Identifier: Apache-2.0
"""The slow reference for the gradient of a random batch: one row at a time in float64, every formula written out.

It shares only the toy's network with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.engine.toy import BOUNDARY, LORA, ToyNetwork, toy_weights

if TYPE_CHECKING:
    from tests.engine.random_batches import RandomBatch, Recorded
    from verl_digen.config import AdvantageConfig, DigenConfig

SIGMAS = torch.tensor([1.0, 0.85, 0.65, 0.45, 0.2, 0.0])


@dataclass(frozen=True)
class Expected:
    """Expected gradient and numbers of the batch."""

    gradient: dict[str, Tensor]
    """float64"""
    magnitude: dict[str, float]
    """For each weight the sum over rows of the norm of the row's gradient: the scale of allowed rounding."""
    policy_loss: float
    loss: float
    """Loss with the KL term."""
    loss_magnitude: float


@dataclass(frozen=True)
class ScoredRow:
    """One (sample, trained step) pair under some weights."""

    velocity: Tensor
    mean: Tensor
    s: float
    std: float
    log_prob: Tensor


def expected(batch: RandomBatch) -> Expected:
    """Results computed sample by sample, step by step."""
    weights, start = leaves(batch.weights), leaves(toy_weights(batch.flavour))
    advantages, edges = _advantages(batch), _edges(batch)
    num_rows = len(edges)
    gradient = {name: torch.zeros_like(value) for name, value in weights.items()}
    magnitude = dict.fromkeys(weights, 0.0)
    policy_loss = loss = loss_magnitude = 0.0
    for key, sample in batch.samples.items():
        rows = [score(batch, sample, step, weights) for step in sample.steps]
        # a row's loss may depend on all rows of its trajectory
        log_ratios = [row.log_prob - recorded for row, recorded in zip(rows, sample.log_probs.tolist(), strict=True)]
        for point, (row, step, log_ratio) in enumerate(zip(rows, sample.steps, log_ratios, strict=True)):
            if (key, point) not in edges:
                continue
            policy = _policy_loss(batch.digen, row.log_prob, log_ratio, log_ratios, advantages[key, point])
            kl = torch.zeros((), dtype=torch.float64)
            if batch.digen.kl.coef > 0:
                reference = score(batch, sample, step, start)
                kl = batch.digen.kl.coef * _divergence(batch.digen.kl.kind, row, reference)
            total = (policy + kl) / num_rows
            shares = torch.autograd.grad(total, list(weights.values()), retain_graph=True, allow_unused=True)
            for name, share in zip(weights, shares, strict=True):
                if share is not None:
                    gradient[name] += share
                    magnitude[name] += share.norm().item()
            policy_loss += policy.item() / num_rows
            loss += total.item()
            loss_magnitude += (abs(policy.item()) + kl.item()) / num_rows
    return Expected(gradient, magnitude, policy_loss, loss, loss_magnitude)


def _policy_loss(
    digen: DigenConfig, log_prob: Tensor, log_ratio: Tensor, log_ratios: Sequence[Tensor], advantage: float
) -> Tensor:
    """The policy loss of one row. `log_ratio`, like its trajectory's `log_ratios`, is against the generating policy."""
    if digen.loss_name == "kimi":
        return -advantage * log_prob + digen.loss["tau"] / 2 * log_ratio**2
    if digen.loss_name == "gspo":
        ratio = torch.stack(list(log_ratios)).mean().exp()
    elif digen.loss["old_log_probs"] == "rollout":
        ratio = log_ratio.exp()
    else:  # against the policy before the update, which is this one
        ratio = torch.exp(log_prob - log_prob.item())
    bound = digen.loss["clip_range"]
    clipped = min(max(ratio.item(), 1 - bound), 1 + bound)
    return -advantage * (ratio if -advantage * ratio.item() >= -advantage * clipped else 0 * ratio + clipped)


def _divergence(kind: str, row: ScoredRow, reference: ScoredRow) -> Tensor:
    """The KL term of one row."""
    if kind == "velocity":
        return (row.velocity - reference.velocity.detach()).square().mean()
    scale = row.s if kind == "flow_grpo" else row.std
    return (row.mean - reference.mean.detach()).square().mean() / (2 * scale**2)


def _edges(batch: RandomBatch) -> dict[tuple[str, int], None]:
    """(key, number of the step) of each row: the first sample that takes a step of its tree trains it."""
    taken: dict[Hashable, tuple[str, int]] = {}
    for key, sample in batch.samples.items():
        for point, step in enumerate(sample.steps):
            node = sample.described.facts.nodes[point] if sample.described.facts.nodes else key
            taken.setdefault((sample.described.facts.uid, step, node), (key, point))
    return dict.fromkeys(taken.values())


def _advantages(batch: RandomBatch) -> dict[tuple[str, int], float]:
    """(key, number of the step) -> the clamped advantage; samples that do not train count among the rewards."""
    config, clip = batch.digen.advantage, batch.digen.loss["advantage_clip"]
    rewards = {key: sample.described.reward for key, sample in batch.samples.items()}
    groups: dict[str, list[str]] = {}
    for key, sample in batch.samples.items():
        groups.setdefault(sample.described.facts.uid, []).append(key)
    spreads = {uid: _spread([rewards[key] for key in keys], config) for uid, keys in groups.items()}
    found = {}
    for uid, keys in groups.items():
        mean = math.fsum(rewards[key] for key in keys) / len(keys)
        divisor = {
            "batch": _spread(list(rewards.values()), config) + config.eps,
            "group": spreads[uid] + config.eps,
            "max_group": max(spreads.values()) + config.eps,
            "none": 1.0,
        }[config.scale]
        for key in keys:
            for point, node in enumerate(batch.samples[key].described.facts.nodes):
                below: dict[int, list[float]] = {}
                for other in keys:
                    below.setdefault(batch.samples[other].described.facts.nodes[point], []).append(rewards[other])
                values = {number: math.fsum(own) / len(own) for number, own in below.items()}
                level = list(values.values())
                own_divisor = _spread(level, config) + config.eps if config.scale == "group" else divisor
                centred = values[node] - math.fsum(level) / len(level)
                has_spread = spreads[uid] > 0 and min(level) < max(level)
                found[key, point] = min(max(centred / own_divisor if has_spread else 0.0, -clip), clip)
            for point in range(0 if batch.samples[key].described.facts.nodes else len(batch.samples[key].steps)):
                centred = 0.0 if spreads[uid] == 0 else rewards[key] - mean
                found[key, point] = min(max(centred / divisor, -clip), clip)
    return found


def _spread(values: Sequence[float], config: AdvantageConfig) -> float:
    """The standard deviation; 0 if all values are equal, e.g. of one sample."""
    if min(values) == max(values):
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - config.ddof))


def score(batch: RandomBatch, sample: Recorded, step: int, weights: Mapping[str, Tensor]) -> ScoredRow:
    """One recorded step under law flow."""
    sigma, next_sigma, second_sigma = SIGMAS[[step, step + 1, 1]].double().tolist()
    dt = next_sigma - sigma
    x, x_next = sample.latents[step].double(), sample.latents[step + 1].double()
    positive, negative = (text.double().mean(dim=0) for text in batch.conditions[sample.described.facts.uid])
    v = velocity(batch.flavour, weights, x, sigma, positive)
    true_cfg_scale = batch.digen.sampling.true_cfg_scale
    if true_cfg_scale != 1:
        unguided = velocity(batch.flavour, weights, x, sigma, negative)
        v = unguided + true_cfg_scale * (v - unguided)
    s = batch.digen.sde.noise_level * math.sqrt(sigma / (1 - (second_sigma if sigma == 1 else sigma)))
    std = s * math.sqrt(-dt)
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    log_prob = (-((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)).mean()
    return ScoredRow(v, mean, s, std, log_prob)


def velocity(flavour: str, weights: Mapping[str, Tensor], x: Tensor, sigma: float, text: Tensor) -> Tensor:
    """[3, 1] the network's output in float64, without guidance."""
    if flavour == "lora":
        merged = leaves(toy_weights("plain"))
        for name in {name.split(".lora_")[0] for name in weights}:
            down, up = weights[f"{name}.lora_A.default.weight"], weights[f"{name}.lora_B.default.weight"]
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + LORA["lora_alpha"] / LORA["lora_rank"] * (up @ down)
        weights = merged
    elif flavour == "experts":
        prefix = "transformer_2." if sigma < BOUNDARY else "transformer."
        weights = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    sigmas = torch.tensor([sigma], dtype=torch.float64)
    return torch.func.functional_call(_network(), dict(weights), (x[None], sigmas, text[None]))[0]


@cache
def _network() -> ToyNetwork:
    """Network whose own weights are never read."""
    return ToyNetwork().double()


def leaves(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights in float64, as leaves that need a gradient."""
    return {name: value.double().requires_grad_() for name, value in weights.items()}
