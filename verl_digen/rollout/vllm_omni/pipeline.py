# SPDX-License-Identifier: Apache-2.0
"""Recording pipeline classes, by name: `Recording<Name>` of this module is vLLM-Omni's class for the diffusers pipeline
`<Name>` with its recording mixin, both from `ModelSpec.vllm_omni`. A worker in another process imports it by name.

Requests of a pipeline that runs step by step (Qwen-Image, `step_mode.StepRecordingMixin`) join and leave the batch at
every step; requests of the others, which run a batch in one call (`request_pipelines`), begin and end together.
"""

from importlib import import_module
from typing import Any

from vllm_omni.diffusion.registry import DiffusionModelRegistry

from verl_digen.patches import vllm_omni_wan_import
from verl_digen.rollout.vllm_omni.settings import require_served

PREFIX = "Recording"
"""Prefix of recording pipeline class names."""
RFC_NAMES = {"QwenImagePipelineWithLogProb": f"{PREFIX}QwenImagePipeline"}
"""Name in verl's RFC -> the recording class that it stands for."""


def recording_class(name: str) -> type[Any]:
    """vLLM-Omni's class for the diffusers pipeline `name` with its recording mixin, a subclass of `RecordingPipeline`.
    ValueError if vLLM-Omni does not serve it."""
    serving = require_served(name)
    if serving.pipeline in vllm_omni_wan_import.PIPELINES:
        vllm_omni_wan_import.apply()
    pipeline = DiffusionModelRegistry.models[serving.pipeline].load_model_cls()
    module, _, mixin = serving.mixin.partition(":")
    bases = getattr(import_module(module, __package__), mixin), pipeline
    return type(f"{PREFIX}{name}", bases, {"__module__": __name__})


def __getattr__(name: str) -> type[Any]:
    if name in RFC_NAMES:
        return getattr(import_module(__name__), RFC_NAMES[name])
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    cls = recording_class(name.removeprefix(PREFIX))
    globals()[name] = cls  # one class object per process
    return cls
