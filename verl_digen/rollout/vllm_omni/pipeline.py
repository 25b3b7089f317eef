# SPDX-License-Identifier: Apache-2.0
"""Recording pipeline classes, by name.

`Recording<Name>` of this module is the pipeline class `<Name>` of vLLM-Omni's registry with its recording mixin: a
worker in another process imports it by name.

| vLLM-Omni runs the pipeline | mixin | requests of a batch |
| --- | --- | --- |
| step by step (Qwen-Image) | `step_mode.StepRecordingMixin` | join and leave at every step |
| in one call per batch (the others) | `request_pipelines.REQUEST_MIXINS` | begin and end together |
"""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.registry import DiffusionModelRegistry

from verl_digen.patches import vllm_omni_wan_import
from verl_digen.rollout.vllm_omni.recorder import RecordingPipeline
from verl_digen.rollout.vllm_omni.request_pipelines import REQUEST_MIXINS
from verl_digen.rollout.vllm_omni.served import require_served
from verl_digen.rollout.vllm_omni.step_mode import StepRecordingMixin

PREFIX = "Recording"
"""Prefix of recording pipeline class names."""

MIXINS: dict[str, type[RecordingPipeline]] = {"QwenImagePipeline": StepRecordingMixin, **REQUEST_MIXINS}
"""Name in vLLM-Omni's registry -> recording mixin."""


def recording_class(name: str) -> type[Any]:
    """vLLM-Omni's pipeline class `name` with its recording mixin, a subclass of `RecordingPipeline`.

    Raises:
        ValueError: `name` is not in `served.SERVED`.
    """
    require_served(name)
    if name == vllm_omni_wan_import.PIPELINE:
        vllm_omni_wan_import.apply()
    pipeline = DiffusionModelRegistry.models[name].load_model_cls()
    return type(f"{PREFIX}{name}", (MIXINS[name], pipeline), {"__module__": __name__})


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    cls = recording_class(name.removeprefix(PREFIX))
    globals()[name] = cls  # one class object per process
    return cls
