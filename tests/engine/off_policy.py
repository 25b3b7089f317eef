# SPDX-License-Identifier: Apache-2.0
"""Samples of an earlier policy, engines that train on them, and their expected gradients; for one rank and for two."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from tests.engine.cases import REWARDS, WINDOWS
from tests.engine.harness import begin, fragment, make_batch, make_engine, perturb, stepped_gradients, with_advantages
from tests.engine.serial import flow_step, gradient_of
from verl_digen.algorithms.metric import numbers
from verl_digen.engine.engine import DiffusersFSDPEngine


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


def old_engine(
    path: Path, name: str, shape: tuple[int, int] = (2, 2), fsdp: dict[str, Any] | None = None, **digen: Any
) -> DiffusersFSDPEngine:
    """Engine whose weights have moved since the samples were generated."""
    tile = {"samples_per_tile": shape[0], "steps_per_tile": shape[1]}
    settings = {"loss": {"name": name, "clip_range": 0.05}, "tsp": tile} | digen
    engine = make_engine(path, digen=settings, fsdp=fsdp, optim={"clip_grad": 1e9})
    perturb(engine)
    return engine


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
