# SPDX-License-Identifier: Apache-2.0
"""Engine arguments for vLLM-Omni, from verl's rollout config and `digen.rollout`."""

import logging
from typing import Any

from vllm_omni.diffusion.data import parse_attention_config

from verl_digen.hardware.versions import ENGINE_TESTED
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.rollout.vllm_omni.pipeline import PREFIX, recording_class
from verl_digen.rollout.vllm_omni.settings import KEY, check_attention, require_served
from verl_digen.rollout.vllm_omni.step_mode import StepRecordingMixin

logger = logging.getLogger(__name__)

PACKAGE = "verl_digen.rollout.vllm_omni"

NOT_KEPT = frozenset({"init_timeout", "stage_init_timeout"})
"""Settings that vLLM-Omni uses only at startup and does not keep in its config."""

ATTENTION = "diffusion_attention_backend"
"""Short name of the setting for the attention kernel."""

OF_STAGE = ("engine_backend", "num_gpus", "enable_prompt_embed_cache", "prompt_embed_cache_size")
"""Arguments that vLLM-Omni 0.30 ignores for a pipeline with a deploy config (Wan, HunyuanVideo 1.5), unless they are
given for its stage, too."""

WAIT_PER_WINDOW = 5
"""vLLM-Omni stops waiting for a fuller batch when no request arrived for 1 / this of the maximum wait, or for 50 ms."""


def engine_arguments(rollout: Any, model: DiffusionModelConfig, *, can_sleep: bool) -> dict[str, Any]:
    """Arguments for `AsyncOmni` by verl's rollout config. `can_sleep`: True if a trainer on the same devices needs
    their memory. ValueError if the pipeline cannot be recorded, or not on this number of devices; or a setting is
    refused."""
    digen = model.digen.rollout
    checkpoint = load_model(model.local_path)
    pipeline = (checkpoint.spec.vllm_omni or require_served(checkpoint.pipeline)).pipeline
    recording = recording_class(pipeline)  # raises here, not in an engine process
    is_stepwise = issubclass(recording, StepRecordingMixin)
    extra = _extra(rollout)
    attention = check_attention(model.digen, extra.get(ATTENTION))
    logger.info("replica: vLLM-Omni's attention %s; enforce_eager=%s", attention, rollout.enforce_eager)
    size = rollout.tensor_model_parallel_size
    arguments: dict[str, Any] = {
        "model": model.local_path,
        "model_class_name": pipeline,  # else vLLM-Omni may take it from the folder's name
        "dtype": rollout.dtype,
        "num_gpus": size,
        "tensor_parallel_size": size,
        "enforce_eager": rollout.enforce_eager,
        "enable_sleep_mode": can_sleep and rollout.free_cache_engine,
        "step_execution": is_stepwise,
        "max_num_seqs": digen.batch_size if is_stepwise or recording.supports_request_batch else 1,
        "request_batch_max_wait_ms": WAIT_PER_WINDOW * digen.batch_wait_s * 1000,
        "vae_use_slicing": not is_stepwise,  # a batch that runs in one call is decoded one by one
        "vae_use_tiling": recording.tiles_vae,
        "enable_prompt_embed_cache": True,
        "prompt_embed_cache_size": digen.embed_cache_size,
        "custom_pipeline_args": {
            "pipeline_class": f"{PACKAGE}.pipeline.{PREFIX}{pipeline}",
            "external_lib": model.external_lib,  # for workers in processes of their own, which have no other config
            "decode_batch_size": digen.decode_batch_size,
        },
        "worker_extension_cls": f"{PACKAGE}.worker.vLLMOmniColocateWorkerExtension",
        "engine_backend": f"{PACKAGE}.engine.VersionedEngine",
        **{key: value for key, value in extra.items() if key != ATTENTION},
        # not by its short name, which vLLM-Omni merges twice where a pipeline has a deploy config
        "diffusion_attention_config": {"default": {"backend": attention}},
    }
    return arguments | {"stage_overrides": {"0": {name: arguments[name] for name in OF_STAGE}}}


def check_taken(arguments: dict[str, Any], rollout: Any, engine_config: Any) -> None:
    """Raise RuntimeError for an argument or a setting that vLLM-Omni silently ignored. `arguments`: from
    `engine_arguments`. `engine_config`: the engine's `OmniDiffusionConfig`."""
    for name in OF_STAGE:
        if (taken := getattr(engine_config, name)) != arguments[name]:
            raise RuntimeError(
                f"vLLM-Omni was to run with {name}={arguments[name]!r} and runs with {taken!r}; install a version that "
                f"was tested: {' or '.join(ENGINE_TESTED)}"
            )
    wanted = {key: value for key, value in _extra(rollout).items() if key not in (*NOT_KEPT, ATTENTION)}
    attention = arguments["diffusion_attention_config"]["default"]["backend"]
    wanted["diffusion_attention_config"] = parse_attention_config(attention_backend=attention)
    for key, value in wanted.items():
        if (taken := getattr(engine_config, key)) != value:
            raise RuntimeError(f"{KEY}: {key} was to be {value!r}, and vLLM-Omni runs with {taken!r}; drop the setting")


def _extra(rollout: Any) -> dict[str, Any]:
    return dict(rollout.engine_kwargs["vllm_omni"]) if "vllm_omni" in rollout.engine_kwargs else {}
