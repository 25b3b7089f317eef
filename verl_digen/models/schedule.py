# SPDX-License-Identifier: Apache-2.0
"""Sigmas of schedules that shift with the number of tokens, as diffusers' pipelines make them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor


def shift_of(scheduler: Any, num_tokens: int) -> float:
    """Shift (mu) of a sample of `num_tokens` latent tokens, by the scheduler's config."""
    config = scheduler.config
    lengths = config.base_image_seq_len, config.max_image_seq_len
    return calculate_shift(num_tokens, *lengths, config.base_shift, config.max_shift)


def shifted_sigmas(schedule: Mapping[str, Any], num_steps: int, num_tokens: int) -> Tensor:
    """Sigmas [T+1] fp32 of equal steps from 1 to 1/T, shifted by the number of tokens.

    Args:
        schedule: the scheduler's config of the checkpoint.
    """
    scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(schedule))
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    scheduler.set_timesteps(sigmas=sigmas, mu=shift_of(scheduler, num_tokens))
    return torch.as_tensor(scheduler.sigmas)
