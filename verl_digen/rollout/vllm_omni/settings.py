# SPDX-License-Identifier: Apache-2.0
"""Pipelines that vLLM-Omni serves, those whose `ModelSpec.vllm_omni` says how, and its settings that a run may set
(`actor_rollout_ref.rollout.engine_kwargs.vllm_omni`). Does not import vLLM-Omni: used before Ray starts, on any
machine.

A setting is passed on if it changes speed, memory or waiting. A setting that changes the numbers of a step is refused:
the recorded log-probs would belong to another policy than the trainer's. A setting that a key of verl or of
`digen.rollout` controls is refused, and so is an unknown one.
"""

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import ray

from verl_digen.config import DigenConfig
from verl_digen.hardware.versions import ENGINE_PACKAGES, ENGINE_TESTED, is_engine_tested
from verl_digen.models import MODELS, is_importable, model_class
from verl_digen.models.spec import VllmOmniServing
from verl_digen.require import require, require_one_of, suggestion

KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm_omni"

ALLOWED: dict[str, type] = {
    "diffusion_attention_backend": str,
    "diffusion_compile_dynamic": bool,
    "diffusion_compile_granularity": str,
    "distributed_executor_backend": str,
    "enable_cpu_offload": bool,
    "enable_diffusion_pipeline_profiler": bool,
    "enable_multithread_weight_load": bool,
    "fa_deterministic": bool,
    "init_timeout": int,
    "num_weight_load_threads": int,
    "stage_init_timeout": int,
    "vae_use_slicing": bool,
    "vae_use_tiling": bool,
}
"""Setting -> type of its value."""

ATTENTION_KEY = f"{KEY}.diffusion_attention_backend"

OF_KERNEL = {
    "native": "TORCH_SDPA",
    "_native_cudnn": "CUDNN_ATTN",
    **dict.fromkeys(("flash", "flash_varlen", "_flash_3", "_flash_varlen_3"), "FLASH_ATTN"),
    **dict.fromkeys(("flash_hub", "flash_varlen_hub"), "FLASH_ATTN_HUB"),
    **dict.fromkeys(("_flash_3_hub", "_flash_3_varlen_hub"), "FLASH_ATTN_3_HUB"),
}
"""Attention kernel by diffusers' name -> vLLM-Omni's of the same kind. Its FLASH_ATTN is FlashAttention 3 where that is
installed, else 2."""

EXACT_ATTENTION = (
    *("auto", "FLASH_ATTN", "FLASH_ATTN_HUB", "FLASH_ATTN_3_HUB", "TORCH_SDPA", "CUDNN_ATTN", "FLASHINFER_ATTN"),
)
"""Attention back ends that neither quantize nor skip anything."""

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("cache_backend", "quantization", "diffusion_kv_cache_dtype"),
        "it computes with other numbers than the trainer, so the recorded log-probs would be wrong",
    ),
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size sets it",
    "dtype": "actor_rollout_ref.rollout.dtype sets it",
    "enforce_eager": "actor_rollout_ref.rollout.enforce_eager sets it",
    "enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine sets it",
    "enable_prompt_embed_cache": "it is always on, of digen.rollout.embed_cache_size prompts",
    "prompt_embed_cache_size": "digen.rollout.embed_cache_size sets it",
    "max_num_seqs": "digen.rollout.max_batch_size sets it",
    "request_batch_max_wait_ms": "digen.rollout.batch_wait_s sets it",
}
"""Setting -> why a run may not set it. Others are refused as unknown: they change numbers or schedules, place weights,
or split a replica in another way than by tensors."""


def require_served(pipeline: str) -> VllmOmniServing:
    """How vLLM-Omni serves `pipeline`, a key of `MODELS`. ValueError, which lists those it serves, if it does not."""
    serving = model_class(pipeline).spec.vllm_omni
    if serving is None:
        served = [name for name in filter(is_importable, MODELS) if model_class(name).spec.vllm_omni is not None]
        raise ValueError(
            "actor_rollout_ref.rollout.name=vllm_omni needs a checkpoint of one of "
            f"{', '.join(served)}, got {pipeline!r}; set actor_rollout_ref.rollout.name=diffusers"
        )
    return serving


def require_bound(serving: VllmOmniServing, *, sends_adapter: bool, targets: object, excluded: object) -> None:
    """Raise ValueError if updates send an adapter with layers to which vLLM-Omni's pipeline cannot bind it. If
    `target_modules` or `exclude_modules` of `actor_rollout_ref.model` is set, this check passes; a module that is still
    unbound is an error at the first request."""
    if serving.unadapted is not None and sends_adapter and targets is None:
        require(
            excluded is not None,
            f"actor_rollout_ref.model.exclude_modules must leave out {serving.unadapted} for an adapter on a "
            f"{serving.pipeline} of actor_rollout_ref.rollout.name=vllm_omni",
            excluded,
            f"set it to '.*{serving.unadapted}.*', or actor_rollout_ref.model.lora.merge=true",
        )


def check_settings(settings: Mapping[str, Any], *, is_stepwise: bool) -> None:
    """ValueError for the first of `engine_kwargs.vllm_omni` that may not be set, with the reason and the remedy."""
    for name, value in settings.items():
        if name in REFUSED:
            raise ValueError(f"{KEY}.{name} must not be set: {REFUSED[name]}; got {value!r}: drop the key")
        hint = suggestion(name, [*ALLOWED, *REFUSED])
        require(name in ALLOWED, f"{KEY} must have keys among {', '.join(ALLOWED)}", name, f"{hint}drop the key")
        kind = ALLOWED[name]
        require(
            isinstance(value, kind) and (kind is bool or not isinstance(value, bool)),
            f"{KEY}.{name} must be of type {kind.__name__}",
            value,
            "correct it, or drop the key",
        )
    require_one_of(ATTENTION_KEY, settings.get("diffusion_attention_backend", "auto"), EXACT_ATTENTION)
    require(
        is_stepwise or not settings.get("enable_cpu_offload", False),
        f"{KEY}.enable_cpu_offload must be false for a pipeline that runs in one go, whose text encoders work beside a "
        "batch and would move its network off the device",
        True,
        "drop the key",
    )


def check_attention(digen: DigenConfig, given: str | None) -> str:
    """The attention back end of vLLM-Omni. `given`: `engine_kwargs.vllm_omni.diffusion_attention_backend`; None: the
    run's kernel, by `OF_KERNEL`. ValueError if both are given, or vLLM-Omni has no such kernel."""
    own = digen.rollout.attention_backend
    if given is not None:
        require(
            own is None,
            f"digen.rollout.attention_backend must be null where {ATTENTION_KEY} is set",
            own,
            "leave one of them out",
        )
        return given
    require(
        digen.rollout_attention_backend in OF_KERNEL,
        f"digen.{'' if own is None else 'rollout.'}attention_backend must be one of {', '.join(OF_KERNEL)} with "
        "actor_rollout_ref.rollout.name=vllm_omni, which has kernels of its own",
        digen.rollout_attention_backend,
        f"choose one of these in digen.rollout.attention_backend, or name vLLM-Omni's own in {ATTENTION_KEY}",
    )
    return OF_KERNEL[digen.rollout_attention_backend]


def check_versions(*, allow_untested: bool) -> None:
    """Raise ValueError unless the installed versions were tested with each other. `allow_untested`:
    `digen.rollout.allow_untested_versions`."""
    found = [version(package) for package in ENGINE_PACKAGES]
    require(
        allow_untested or is_engine_tested(found),
        "actor_rollout_ref.rollout.name=vllm_omni was tested with vllm and vllm-omni "
        f"{' or '.join(ENGINE_TESTED)}, both the same, and uses internals of them",
        " and ".join(found),
        f"pip install vllm=={ENGINE_TESTED[0]} vllm-omni=={ENGINE_TESTED[0]}, or run tests/vllm_omni against yours and "
        "set digen.rollout.allow_untested_versions=true",
    )


def sockets_of(replica_rank: int) -> str:
    """Name of a replica's sockets, for `address`; no other run on this machine has it."""
    run = ray.get_runtime_context()
    return f"digen-weights-{run.get_session_name()}-{run.get_job_id()}-{replica_rank}"


def address(sockets: str, local_rank: int) -> str:
    """Socket that the trainer rank of a worker binds, and to which the worker connects. `sockets`: `sockets_of` its
    replica, at the sender. `local_rank`: the worker's, on its node."""
    return f"ipc:///tmp/{sockets}-{local_rank}.sock"
