# SPDX-License-Identifier: Apache-2.0
"""Rules and notes about attention kernels, compiled blocks and dtypes, of the trainer and of the replicas."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from omegaconf import DictConfig, OmegaConf
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.algorithms.objectives import clips_recorded
from verl_digen.config import DigenConfig
from verl_digen.hardware.attention import ATTENTION_BACKENDS, NATIVE, Package
from verl_digen.models.sequence import TRAINER_KEY
from verl_digen.preflight.model import model_of, trains_all
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require, require_value
from verl_digen.rollout.vllm_omni.settings import ATTENTION_KEY, check_attention

FSDP = "actor_rollout_ref.actor.fsdp_config"
ROLLOUT_DTYPE = "actor_rollout_ref.rollout.dtype"
DTYPE_DEFAULTS = {"param_dtype": "bf16", "reduce_dtype": "fp32"}
"""verl's own, see `FSDPEngine._build_fsdp_module`."""

RECORDED_NOISE = {torch.bfloat16: 1e-4, torch.float16: 1.25e-5}
"""Clip range below which rounding of recorded log-probs is clipped, by the coarser dtype of trainer and replicas. A
relative error of 0.5 % in the velocity, as bf16 kernels of other batch shapes have it, moves the log-prob of Qwen-Image
at 512 px by up to 1.4e-5, and HunyuanVideo's by up to 4.4e-5 (simulated: noise of that size on random
velocities). fp16 has three more bits."""
COARSENESS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
KEY, ROLLOUT_KEY = "digen.attention_backend", "digen.rollout.attention_backend"
OMNI_VARIABLE = "DIFFUSION_ATTENTION_BACKEND"
"""Environment variable that chooses vLLM-Omni's attention where no setting does."""


@dataclass(frozen=True)
class Side:
    """One side of a run that runs the network through diffusers."""

    key: str
    """Key that chose its attention kernel."""
    attention: str
    compiles: bool
    compile_key: str
    dtype: str
    trains: bool
    size: int
    """Devices that share a row's tokens."""


def sides(run: StartConfig) -> Iterator[Side]:
    """The trainer, and the replicas unless they are vLLM-Omni's."""
    digen = run.digen
    size = run.config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    dtype = _dtype_names(run.config)["param_dtype"]
    yield Side(KEY, digen.attention_backend, digen.compile, "digen.compile", dtype, True, size)
    if run.config.actor_rollout_ref.rollout.name == "diffusers":
        own, compiles = digen.rollout.attention_backend, digen.rollout.compile
        yield Side(
            KEY if own is None else ROLLOUT_KEY,
            digen.rollout_attention_backend,
            digen.rollout_compiles,
            "digen.compile" if compiles is None else "digen.rollout.compile",
            run.config.actor_rollout_ref.rollout.dtype,
            False,
            1,
        )


def check_kernels(run: StartConfig) -> None:
    """Require kernels that can do what each side asks of them, and settings that reach vLLM-Omni."""
    for side in sides(run):
        check_use(side.key, side.attention, trains=side.trains, dtype=side.dtype, device=run.device)
        if side.size > 1:
            _check_split(side, needs_masks=False)
    if run.config.actor_rollout_ref.rollout.name != "vllm_omni":
        return
    why = ", which compiles by actor_rollout_ref.rollout.enforce_eager"
    remedy = "leave it out, and set actor_rollout_ref.rollout.enforce_eager=false to compile"
    condition = "with actor_rollout_ref.rollout.name=vllm_omni"
    run.require_values(condition, ("digen.rollout.compile", None, why, remedy))
    check_attention(run.digen, OmegaConf.select(run.config, ATTENTION_KEY))


def check_kernel_machine(run: StartConfig) -> None:
    """Require kernels that are installed and run on the platform's devices, and the tools of a compiler."""
    device = run.device
    for side in sides(run):
        check_machine(side.key, side.attention, device)
        has_tools = shutil.which(os.environ.get("CXX", "g++")) if device == "cpu" else find_spec("triton")
        if has_tools is None:
            tool, remedy = "triton", "install triton"
            if device == "cpu":
                tool, remedy = "a C++ compiler", "install g++, or name another one in CXX"
            why = f"without {tool}, which torch.compile needs"
            require_value(side.compile_key, side.compiles, False, why, remedy)
    named = os.environ.get(OMNI_VARIABLE)
    require(
        run.config.actor_rollout_ref.rollout.name != "vllm_omni" or named is None,
        f"the environment variable {OMNI_VARIABLE} must not be set with actor_rollout_ref.rollout.name=vllm_omni, "
        f"because {ROLLOUT_KEY} decides",
        named,
        f"unset it, and set {ROLLOUT_KEY} or {ATTENTION_KEY}",
    )


def check_kernel_model(run: StartConfig) -> None:
    """Require a network in which attention can be chosen, if it is chosen, and a kernel with masks where devices share
    the tokens of prompts of any length: they are padded to a length that divides."""
    chosen = [side for side in sides(run) if side.attention != NATIVE]
    model = model_of(run.config) if chosen else None
    if model is None:
        return
    spec = model.spec
    for side in chosen:
        if not spec.dispatches_attention:
            why = f"for {spec.title}, whose network in diffusers calls PyTorch's own attention"
            require_value(side.key, side.attention, NATIVE, why, "leave it out")
        if side.size > 1 and spec.sequence is not None and spec.sequence.splits_prompts and model.pads_texts:
            _check_split(side, needs_masks=True)


def kernel_notes(run: StartConfig) -> list[str]:
    """Notes on sides that compute with different kernels."""
    digen = run.digen
    with_omni = run.config.actor_rollout_ref.rollout.name == "vllm_omni"
    differing = []
    if digen.rollout_attention_backend != digen.attention_backend:
        differing.append(f"{ROLLOUT_KEY}={digen.rollout_attention_backend}, {KEY}={digen.attention_backend}")
    elif with_omni and (given := OmegaConf.select(run.config, ATTENTION_KEY)) is not None:
        differing.append(f"{ATTENTION_KEY}={given}, {KEY}={digen.attention_backend}")
    if with_omni and digen.compile == bool(run.config.actor_rollout_ref.rollout.enforce_eager):
        eager = str(bool(run.config.actor_rollout_ref.rollout.enforce_eager)).lower()
        differing.append(f"actor_rollout_ref.rollout.enforce_eager={eager}, digen.compile={str(digen.compile).lower()}")
    elif not with_omni and digen.rollout_compiles != digen.compile:
        differing.append(f"digen.rollout.compile={digen.rollout_compiles}, digen.compile={digen.compile}".lower())
    if not differing:
        return []
    return [
        f"replicas and trainer run other kernels ({'; '.join(differing)}), which round differently: "
        "rollout/log_prob_gap_max says how far recorded log-probs are from the trainer's"
    ]


def check_use(key: str, name: str, *, trains: bool, dtype: str, device: str) -> None:
    """Raise ValueError if the kernel cannot do what this side of the run asks of it on this type of device."""
    backend = ATTENTION_BACKENDS[name]
    require(
        backend.trains or not trains,
        f"{key} must be a kernel with a backward for the trainer: diffusers calls this one without",
        name,
        "set digen.attention_backend=_flash_varlen_3 or _flash_3_hub, and the same for the replicas",
    )
    require(
        backend.takes_fp32 or "32" not in dtype or device == "cpu",
        f"{key} must be a kernel for {dtype}, in which this side computes",
        name,
        "set it to native, or compute in bfloat16",
    )


def _check_split(side: Side, *, needs_masks: bool) -> None:
    """Require a kernel that trains where devices share a row's tokens; `needs_masks`: prompts are padded."""
    able = [
        name
        for name, backend in ATTENTION_BACKENDS.items()
        if backend.splits and (backend.splits_masks or not needs_masks)
    ]
    padded = ", under the mask of prompts that are padded for it" if needs_masks else ""
    require(
        side.attention in able,
        f"{side.key} must be a kernel that diffusers can run on a row's tokens split over devices, with its backward"
        f"{padded}",
        side.attention,
        f"choose one of {', '.join(able)}, or set {TRAINER_KEY} to 1",
    )


def check_machine(key: str, name: str, device: str) -> None:
    """Raise ValueError unless the kernel runs on this type of device, and its package is installed."""
    backend = ATTENTION_BACKENDS[name]
    require(
        not backend.devices or device in backend.devices,
        f"{key} must be a kernel for {device}, the device of this run",
        name,
        f"it runs on {' or '.join(backend.devices)}; native runs everywhere",
    )
    package = backend.package
    if package is None:
        return
    found = _version(package)
    wanted = package.distribution + (f">={'.'.join(map(str, package.least))}" if package.least else "")
    require(
        found is not None and found >= package.least,
        f"{key} must be a kernel that is installed, and this one needs {wanted}",
        name,
        f"install {wanted} in the environment of the run, or set it to native",
    )


def _version(package: Package) -> tuple[int, ...] | None:
    """The installed version's numbers; None where it is not installed."""
    if find_spec(package.module) is None:
        return None
    try:
        numbers = version(package.distribution).split("+")[0].split(".")
    except PackageNotFoundError:  # a build from source may have another distribution's name
        return (10**6,)
    return tuple(int(number) for number in numbers if number.isdigit())


def check_precision(run: StartConfig) -> None:
    """Require fp32 sums and fp32 trained weights of training in fp16."""
    computed, summed = _precision(run.config)
    if computed != torch.float16:
        return
    require(
        summed == torch.float32,
        f"{FSDP}.mixed_precision.reduce_dtype must be fp32 with {FSDP}.mixed_precision.param_dtype=fp16: sums of "
        "scaled gradients overflow",
        DTYPE_NAMES[summed],
        "set it to fp32",
    )
    stored = PrecisionType.to_dtype(run.config.actor_rollout_ref.actor.fsdp_config.model_dtype)
    require(
        not trains_all(run.config) or stored == torch.float32,
        f"{FSDP}.model_dtype must be fp32 where all weights are trained and {FSDP}.mixed_precision.param_dtype=fp16: "
        "updates are lost on weights in fewer bits",
        DTYPE_NAMES[stored],
        "set it to fp32, or train an adapter (actor_rollout_ref.model.lora_rank=32)",
    )


def precision_notes(config: DictConfig, digen: DigenConfig) -> list[str]:
    """Notes on dtypes that may be unintended."""
    trained, served = _precision(config)[0], PrecisionType.to_dtype(config.actor_rollout_ref.rollout.dtype)
    found = _noise_notes(digen, max(trained, served, key=COARSENESS.__getitem__))
    stored = PrecisionType.to_dtype(config.actor_rollout_ref.actor.fsdp_config.model_dtype)
    if trains_all(config) and stored != torch.float32:
        lost = "updates that are small beside a weight are lost; set it to fp32"
        found.append(f"{FSDP}.model_dtype={DTYPE_NAMES[stored]} holds all weights, which train, and moments: {lost}")
    if trained != served:
        found.append(
            f"replicas compute in {DTYPE_NAMES[served]} ({ROLLOUT_DTYPE}) and the trainer in {DTYPE_NAMES[trained]} "
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
        f"digen.loss.{key}={width:g} is as narrow as the rounding of {DTYPE_NAMES[coarser]} log-probs (up to "
        f"{least / 2:.0e}), which with {cause} are compared with the trainer's: ratios would be clipped for noise; set "
        f"it to {least:g} or more; rollout/log_prob_gap_mean of the first steps says what it is"
    ]


def _dtype_names(config: DictConfig) -> dict[str, str]:
    """param_dtype and reduce_dtype of the trainer, as typed."""
    return {**DTYPE_DEFAULTS, **(OmegaConf.select(config, f"{FSDP}.mixed_precision") or {})}


def _precision(config: DictConfig) -> tuple[torch.dtype, torch.dtype]:
    """dtypes in which the trainer computes, and sums gradients."""
    names = _dtype_names(config)
    return PrecisionType.to_dtype(names["param_dtype"]), PrecisionType.to_dtype(names["reduce_dtype"])
