# SPDX-License-Identifier: Apache-2.0
"""Samples of an earlier policy, engines that train on them, and their expected gradients; for one rank and for two."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tests.engine.cases import REWARDS, WINDOWS
from tests.engine.harness import begin, fragment, make_batch, make_engine, perturb, stepped_gradients, with_advantages
from tests.engine.serial import flow_step
from verl_digen.algorithms.losses import default_config, policy_loss
from verl_digen.algorithms.metric import numbers
from verl_digen.algorithms.objectives.gspo import trajectory_log_ratios
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name

BOUNDS: dict[str, dict[str, Any]] = {
    "cispo": {"low": 0.05, "high": 0.05},
    "topr": {"threshold": 4.2},
    "weighted_topr": {"threshold": 4.2},
    "decoupled_ppo": {"clip_range": 0.05, "cap": 1.05},
    "flow_grpo": {"clip_range": 0.05},
    "dance_grpo": {"clip_range": 0.05},
    "gspo": {"clip_range": 0.05},
}
"""Loss -> bounds that bind for some rows and not for others."""
WHOLE = (("g0", "g1", "g2"),)
"""Order of one fragment."""
SHAPES = [(1, 1), (2, 2), (3, 1), (100, 100)]


def old_batch(path: Path) -> TensorDict:
    """9 samples with 3, 1 or 2 trained steps, of a policy some 10% from that of the checkpoint."""
    batch = make_batch(path, windows=WINDOWS)
    generator = torch.Generator().manual_seed(3)
    moved = [
        values - 0.1 + 0.15 * torch.randn(len(values), generator=generator) for values in batch["log_probs"].unbind()
    ]
    batch["log_probs"] = torch.nested.as_nested_tensor(moved, layout=torch.jagged)
    batch["rm_scores"] = torch.tensor(REWARDS)[:, None]
    return with_advantages(batch, REWARDS, "batch", 5.0)


def loss_of(name: str, **settings: Any) -> dict[str, Any]:
    """`digen.loss` of a loss with its bounds."""
    return {"name": name, **BOUNDS.get(name, {}), **settings}


def old_engine(
    path: Path, name: str, shape: tuple[int, int] = (2, 2), fsdp: dict[str, Any] | None = None, **digen: Any
) -> DiffusersFSDPEngine:
    """Engine whose weights have moved since the samples were generated."""
    tile = {"samples_per_tile": shape[0], "steps_per_tile": shape[1]}
    settings = {"loss": loss_of(name), "tsp": tile} | digen
    engine = make_engine(path, digen=settings, fsdp=fsdp, optim={"clip_grad": 1e9})
    perturb(engine)
    return engine


def serial(module: nn.Module, path: Path, batch: TensorDict, name: str, samples: list[int]) -> dict[str, Tensor]:
    """The gradient with every row evaluated by itself, and all rows in one call of the loss."""
    rows = [(sample, step) for sample in samples for step in range(len(batch["positions"][sample]))]
    log_prob = torch.stack([serial_log_prob(module, path, batch, *row) for row in rows])
    behaviour = torch.stack([batch["log_probs"][sample][step] for sample, step in rows])
    of_sample = torch.tensor([sample for sample, _ in rows])
    inputs = {
        "log_prob": log_prob,
        "old_log_prob": log_prob.detach(),
        "behaviour_log_prob": behaviour,
        "trajectory_log_ratio": trajectory_log_ratios(log_prob.detach() - behaviour, of_sample),
        "advantage": batch["advantages"][of_sample],
        "reward": batch["rm_scores"].flatten()[of_sample],
    }
    policy_loss(name, inputs, replace(default_config(name), **BOUNDS.get(name, {}))).loss.backward()
    return gradient_of(module)


def serial_gspo(module: nn.Module, path: Path, batch: TensorDict) -> dict[str, Tensor]:
    """GSPO by its formula: one graph through all log-probs of a trajectory."""
    num_rows = sum(len(positions) for positions in batch["positions"].unbind())
    for sample, positions in enumerate(batch["positions"].unbind()):
        log_ratios = [
            serial_log_prob(module, path, batch, sample, step) - batch["log_probs"][sample][step]
            for step in range(len(positions))
        ]
        ratio = torch.stack(log_ratios).mean().exp()
        advantage = batch["advantages"][sample]
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 0.05, 1 + 0.05))
        (loss * len(positions) / num_rows).backward()
    return gradient_of(module)


def serial_log_prob(module: nn.Module, path: Path, batch: TensorDict, sample: int, step: int) -> Tensor:
    mean, s, dt, x_next, _ = flow_step(module, path, batch, sample, step, 1.0)
    std = s * torch.sqrt(-dt)
    return (-((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)).mean()


def gradient_of(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): value.grad for name, value in module.named_parameters() if value.grad is not None}


def committed(
    engine: DiffusersFSDPEngine,
    batch: TensorDict,
    order: tuple[tuple[str, ...], ...] = (("g2",), ("g0",), ("g1",)),
    rewards: list[float] = REWARDS,
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """(gradient, metrics) of the batch, fragment by fragment."""
    groups = begin(engine, batch, rewards)
    for uids in order:
        engine.accumulate(fragment(groups, *uids))
    with stepped_gradients(engine) as found:
        metrics = numbers(engine.commit()["metrics"])
    return found, metrics
