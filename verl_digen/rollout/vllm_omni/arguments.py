# SPDX-License-Identifier: Apache-2.0
"""verl's rollout config and `digen.rollout` -> arguments of vLLM-Omni's engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl.plugin.platform import get_platform

from verl_digen.engine.model_config import DiffusionModelConfig
from verl_digen.rollout.vllm_omni.pipeline import PREFIX, recording_class
from verl_digen.rollout.vllm_omni.step_mode import StepRecordingMixin

PACKAGE = "verl_digen.rollout.vllm_omni"

OWN_ARGUMENTS = frozenset(
    {
        *("model", "custom_pipeline_args", "worker_extension_cls", "engine_backend", "step_execution"),
        *("max_num_seqs", "dtype", "num_gpus", "tensor_parallel_size", "max_cpu_loras", "request_batch_max_wait_ms"),
    }
)
"""What `actor_rollout_ref.rollout.engine_kwargs.vllm_omni` may not set: we do, or a key of ours does."""


WAIT_PER_WINDOW = 5
"""vLLM-Omni ends its wait for a fuller batch when none came for this part of the longest wait, or for 50 ms."""


def engine_arguments(rollout: Any, model: DiffusionModelConfig, *, can_sleep: bool) -> dict[str, Any]:
    """Arguments for `AsyncOmni`.

    Args:
        rollout: verl's rollout config.
        can_sleep: whether a trainer on the same devices will want their memory.

    Raises:
        ValueError: a pipeline that cannot record or not on so many devices, or engine_kwargs that contradict us.
    """
    digen = model.digen.rollout
    pipeline = json.loads((Path(model.local_path) / "model_index.json").read_text())["_class_name"]
    recording = recording_class(pipeline)  # says what is wrong here, not in another process
    is_stepwise = issubclass(recording, StepRecordingMixin)
    extra = _extra(rollout)
    clashes = sorted(extra.keys() & OWN_ARGUMENTS)
    if clashes:
        raise ValueError(
            f"actor_rollout_ref.rollout.engine_kwargs.vllm_omni must not set {', '.join(clashes)}; "
            "verl's own keys and those under digen.rollout do"
        )
    size = rollout.tensor_model_parallel_size
    if size > 1 and not is_stepwise and get_platform().device_name == "cpu":
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size must be 1 on a CPU for {pipeline}, whose workers do "
            f"not answer there because vLLM-Omni runs it in one go, got {size}; set it to 1"
        )
    return {
        "model": model.local_path,
        "dtype": rollout.dtype,
        "num_gpus": size,
        "tensor_parallel_size": size,
        "enforce_eager": rollout.enforce_eager,
        "enable_sleep_mode": can_sleep and rollout.free_cache_engine,
        "step_execution": is_stepwise,
        "max_num_seqs": digen.max_batch_size if is_stepwise or recording.supports_request_batch else 1,
        "request_batch_max_wait_ms": WAIT_PER_WINDOW * digen.batch_wait_s * 1000,
        "enable_prompt_embed_cache": True,
        "prompt_embed_cache_size": digen.embed_cache_size,
        "custom_pipeline_args": {"pipeline_class": f"{PACKAGE}.pipeline.{PREFIX}{pipeline}"},
        "worker_extension_cls": f"{PACKAGE}.worker.WeightReceiverExtension",
        "engine_backend": f"{PACKAGE}.engine.VersionedEngine",
        **extra,
    }


def check_taken(rollout: Any, engine_config: Any) -> None:
    """Raise ValueError for engine_kwargs that vLLM-Omni did not take, of which it says nothing itself.

    Args:
        engine_config: the `OmniDiffusionConfig` it runs with.
    """
    for key, value in _extra(rollout).items():
        taken = getattr(engine_config, key, None)
        if taken != value:
            raise ValueError(
                f"actor_rollout_ref.rollout.engine_kwargs.vllm_omni.{key}={value!r} is not taken by vLLM-Omni, which "
                f"runs with {taken!r}; drop the key, or spell it as a field of its OmniDiffusionConfig"
            )


def _extra(rollout: Any) -> dict[str, Any]:
    return dict(rollout.engine_kwargs["vllm_omni"]) if "vllm_omni" in rollout.engine_kwargs else {}
