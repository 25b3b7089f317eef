# SPDX-License-Identifier: Apache-2.0
"""Record the parts of a denoising path that training needs, on replicas and trainers alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl_digen.algorithms.noise import sample_seed
from verl_digen.algorithms.window import Window
from verl_digen.models.base import DiffusionModel
from verl_digen.types import SampleRequest, Trajectory


def initial_seed(run_seed: int, request: SampleRequest) -> int:
    """Seed of a sample's initial noise; that of its group's sample 0 if the group shares one."""
    index = 0 if request.sampling.shared_initial_noise else request.sample_index
    return sample_seed(run_seed, request.uid, index)


def experts_of(model: DiffusionModel, trajectory: Trajectory) -> tuple[int, ...]:
    """Number of the network that runs each trained step; () if the model has one network."""
    return tuple(model.expert_of(trajectory.sigmas).tolist()) if len(model.experts) > 1 else ()


def generation_facts(*, version: int, started_s: float, ended_s: float, experts: tuple[int, ...]) -> dict[str, Any]:
    """`Generation.extra_fields`, on replicas and trainers alike.

    Args:
        version: weight version of the last step. started_s, ended_s: unix time.
        experts: see `experts_of`.
    """
    return {
        "global_steps": version,
        "generate_start_s": started_s,
        "generate_end_s": ended_s,
        "experts": experts,
    }


def trained_latents(window: Window) -> list[int]:
    """Steps whose latents training needs, ascending: the start and the end of each trained step."""
    return sorted({step for start in window.train_steps for step in (start, start + 1)})


def record_trajectory(
    request: SampleRequest,
    *,
    seed: int,
    versions: tuple[int, int],
    path: Mapping[int, Tensor],
    sigmas: Tensor,
    log_probs_T: Tensor,
    empty: Tensor,
) -> Trajectory:
    """One sample's trajectory, on the CPU.

    Args:
        seed: seed of its initial noise.
        versions: weight versions of the first and of the last step.
        path: step -> latents [...], at the `trained_latents`, ascending.
        sigmas: [T+1] on the CPU. log_probs_T: [T], 0 where the step was deterministic.
        empty: [0, ...], the latents of a sample that trains no step.
    """
    steps = list(path)
    trained = torch.tensor(request.window.train_steps, dtype=torch.int64)
    return Trajectory(
        uid=request.uid,
        sample_index=request.sample_index,
        latents=(torch.stack(list(path.values())) if path else empty).cpu(),
        positions=torch.tensor([steps.index(start) for start in request.window.train_steps], dtype=torch.int64),
        sigmas=sigmas[trained],
        next_sigmas=sigmas[trained + 1],
        sigma_max=sigmas[1].clone(),
        log_probs=log_probs_T.cpu()[trained],
        seed=seed,
        version=versions[0],
        last_version=versions[1],
        sampling=request.sampling,
        condition_key=request.condition_key,
    )
