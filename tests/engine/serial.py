# SPDX-License-Identifier: Apache-2.0
"""The slow reference: plain torch, one row at a time, formulas written out."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

from tests.engine.harness import full_gradient
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models import load_model

ETA = 0.7


def plain_transformer(path: Path, state: dict[str, Tensor] | None = None) -> nn.Module:
    """The checkpoint's transformer, with other weights if given."""
    module = load_model(path).load_transformer(torch.float32)
    if state is not None:
        module.load_state_dict(state)
    return module


def plain_lora(path: Path, config: LoraConfig, adapter: dict[str, Tensor]) -> PeftModel:
    """The checkpoint's transformer with this adapter."""
    module = get_peft_model(plain_transformer(path), config)
    set_peft_model_state_dict(module, adapter)
    return module


def plain_module(engine: DiffusersFSDPEngine, path: Path, state: dict[str, Tensor]) -> nn.Module:
    """The network that the engine trains, without FSDP, with these exported weights."""
    if engine._is_lora:
        return plain_lora(path, engine.model_config.lora_config(), state)
    return plain_transformer(path, state)


def flow_step(module: nn.Module, path: Path, batch: TensorDict, sample: int, step: int, true_cfg_scale: float):
    """(mean of x', its s, dt, x', v) of one recorded step under law flow, batch size 1."""
    latents = batch["latents"][sample]
    position = int(batch["positions"][sample][step])
    x, x_next = latents[position][None], latents[position + 1][None]
    sigma = batch["sigmas"][sample][step]
    dt = batch["next_sigmas"][sample][step] - sigma
    positive, negative = tu.get(batch, "conditions")[tu.get(batch, "uid")[sample]]
    v = load_model(path).velocity(
        module,
        x,
        sigma[None],
        [positive],
        None if negative is None else [negative],
        true_cfg_scale,
        tu.get(batch, "sampling").geometry,
    )
    shifted = batch["sigma_max"][sample] if sigma > 1 - 1e-5 else sigma  # Wan's schedule begins at 0.999999
    s = ETA * torch.sqrt(sigma / (1 - shifted))
    mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
    return mean, s, dt, x_next, v


def log_density(mean: Tensor, s: Tensor, dt: Tensor, x_next: Tensor) -> Tensor:
    """log π of a recorded step, as `flow_step` returns it: the mean over the numbers of x'."""
    std = s * torch.sqrt(-dt)
    return (-((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)).mean()


def serial_loss_and_gradient(
    module: nn.Module,
    path: Path,
    batch: TensorDict,
    samples: Sequence[int],
    *,
    reference: nn.Module | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "flow_grpo",
    true_cfg_scale: float = 1.0,
) -> tuple[float, dict[str, Tensor]]:
    """FlowGRPO on the first pass (old log-probs are this pass's), sample by sample, step by step."""
    module.zero_grad()
    num_rows = sum(len(batch["positions"][sample]) for sample in samples)
    total = 0.0
    for sample in samples:
        for step in range(len(batch["positions"][sample])):
            mean, s, dt, x_next, v = flow_step(module, path, batch, sample, step, true_cfg_scale)
            log_prob = log_density(mean, s, dt, x_next)
            ratio = torch.exp(log_prob - log_prob.detach())
            advantage = batch["advantages"][sample]
            loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - 1e-4, 1 + 1e-4))
            if reference is not None:
                with torch.no_grad():
                    reference_mean, *_, reference_v = flow_step(reference, path, batch, sample, step, true_cfg_scale)
                kl = {
                    "flow_grpo": ((mean - reference_mean) ** 2).mean() / (2 * s.squeeze() ** 2),
                    "exact": ((mean - reference_mean) ** 2).mean() / (2 * s.squeeze() ** 2 * -dt),
                    "velocity": ((v - reference_v) ** 2).mean(),
                }
                loss = loss + kl_coef * kl[kl_kind]
            (loss.sum() / num_rows).backward()
            total += loss.sum().item() / num_rows
    return total, full_gradient(module)
