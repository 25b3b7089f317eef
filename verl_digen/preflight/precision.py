# SPDX-License-Identifier: Apache-2.0
"""Rules and notes about the dtypes of trainer and replicas."""

from __future__ import annotations

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.algorithms.objectives import clips_recorded
from verl_digen.config import DigenConfig
from verl_digen.preflight.model import model_of
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require

FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
VERL_DEFAULTS = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
"""verl's own, see `FSDPEngine._build_fsdp_module`."""

RECORDED_NOISE = {torch.bfloat16: 1e-4, torch.float16: 1.25e-5}
"""Clip range below which rounding of recorded log-probs is clipped, by the coarser dtype of trainer and replicas. A
relative error of 0.5 % in the velocity, as bf16 kernels of other batch shapes have it, moves the log-prob of Qwen-Image
at 512 px by up to 1.4e-5, and HunyuanVideo's by up to 4.4e-5 (simulated: noise of that size on random
velocities). fp16 has three more bits."""
COARSENESS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def compute_dtype(config: DictConfig) -> torch.dtype:
    """dtype in which the trainer computes."""
    return _precision(config)["param_dtype"]


def trains_all(config: DictConfig) -> bool:
    """True if all weights train, not an adapter."""
    model = config.actor_rollout_ref.model
    return not (model.lora_rank or (model.lora or {}).get("rank") or model.lora_adapter_path)


def check_precision(run: StartConfig) -> None:
    """Require fp32 sums and fp32 trained weights of training in fp16."""
    if compute_dtype(run.config) != torch.float16:
        return
    require(
        _precision(run.config)["reduce_dtype"] == torch.float32,
        f"{FSDP}.mixed_precision.reduce_dtype must be fp32 with {FSDP}.mixed_precision.param_dtype=fp16: sums of "
        "scaled gradients overflow",
        NAMES[_precision(run.config)["reduce_dtype"]],
        "set it to fp32",
    )
    stored = PrecisionType.to_dtype(run.config.actor_rollout_ref.actor.fsdp_config.model_dtype)
    require(
        not trains_all(run.config) or stored == torch.float32,
        f"{FSDP}.model_dtype must be fp32 where all weights are trained and {FSDP}.mixed_precision.param_dtype=fp16: "
        "updates are lost on weights in fewer bits",
        NAMES[stored],
        "set it to fp32, or train an adapter (actor_rollout_ref.model.lora_rank=32)",
    )


def precision_notes(config: DictConfig, digen: DigenConfig) -> list[str]:
    """Notes on dtypes that may be unintended."""
    trained, served = compute_dtype(config), PrecisionType.to_dtype(config.actor_rollout_ref.rollout.dtype)
    found = _noise_notes(digen, max(trained, served, key=COARSENESS.__getitem__))
    if trained != served:
        found.append(
            f"replicas compute in {NAMES[served]} ({ROLLOUT_DTYPE}) and the trainer in {NAMES[trained]} "
            f"({FSDP}.mixed_precision.param_dtype), so that their log-probs differ (rollout/log_prob_gap_mean); set "
            "both alike"
        )
    model = model_of(config) if torch.float16 in (trained, served) else None
    if model is not None and not model.spec.runs_in_fp16:
        found.append(
            f"{model.spec.title} was trained in bf16, and its activations may overflow fp16, to pictures without "
            "content and skipped updates (actor/num_skipped_updates); set "
            f"{FSDP}.mixed_precision.param_dtype=bf16 and {ROLLOUT_DTYPE}=bfloat16"
        )
    return found


def _noise_notes(digen: DigenConfig, coarser: torch.dtype) -> list[str]:
    """Note on a clip range that rounding fills: a ratio to log-probs that replicas recorded."""
    settings = digen.loss_settings
    least = RECORDED_NOISE.get(coarser)
    if least is None or not clips_recorded(digen.loss_name, settings, digen.denominator):
        return []
    narrow = [(key, width) for key, width in settings.clip_widths.items() if width < least * (1 - 1e-6)]
    if not narrow:
        return []
    key, width = narrow[0]
    if digen.denominator != "rollout":
        cause = f"digen.loss.name={digen.loss_name}"
    elif digen.staleness.max_versions:
        cause = "digen.staleness.max_versions > 0"
    else:
        cause = "digen.loss.old_log_probs=rollout"
    return [
        f"digen.loss.{key}={width:g} is as narrow as the rounding of {NAMES[coarser]} log-probs (up to "
        f"{least / 2:.0e}), which with {cause} are compared with the trainer's: ratios would be clipped for noise; set "
        f"it to {least:g} or more; rollout/log_prob_gap_mean of the first steps says what it is"
    ]


def _precision(config: DictConfig) -> dict[str, torch.dtype]:
    """param_dtype and reduce_dtype of the trainer."""
    given = OmegaConf.select(config, f"{FSDP}.mixed_precision") or {}
    return {name: PrecisionType.to_dtype(value) for name, value in {**VERL_DEFAULTS, **given}.items()}
