# SPDX-License-Identifier: Apache-2.0
"""Sigmas of flow-matching schedules, as diffusers' pipelines make them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import Tensor


def flow_sigmas(schedule: Mapping[str, Any], *, num_tokens: int | None = None, **steps: Any) -> Tensor:
    """Sigmas [T+1] fp32 of `FlowMatchEulerDiscreteScheduler` with the checkpoint's scheduler config and `steps`,
    arguments of its `set_timesteps`. `num_tokens`: latent tokens of a sample, by which the config shifts the schedule
    (mu), if it does."""
    scheduler: Any = FlowMatchEulerDiscreteScheduler.from_config(dict(schedule))
    if num_tokens is not None:
        config = scheduler.config
        lengths = config.base_image_seq_len, config.max_image_seq_len
        steps["mu"] = calculate_shift(num_tokens, *lengths, config.base_shift, config.max_shift)
    scheduler.set_timesteps(**steps)
    return torch.as_tensor(scheduler.sigmas)


def shifted_sigmas(schedule: Mapping[str, Any], num_steps: int, num_tokens: int) -> Tensor:
    """Sigmas [T+1] fp32 of equal steps from 1 to 1/T, shifted by the number of tokens."""
    return flow_sigmas(schedule, num_tokens=num_tokens, sigmas=np.linspace(1.0, 1 / num_steps, num_steps))
