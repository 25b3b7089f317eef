# SPDX-License-Identifier: Apache-2.0
"""The recording pipelines, by name.

`Recording<Name>` of this module is the pipeline class `<Name>` of vLLM-Omni's registry with what records over it: a
worker in another process finds it by name.

| vLLM-Omni runs the pipeline | mixin | requests of a batch |
| --- | --- | --- |
| step by step (Qwen-Image) | `step_mode.StepRecordingMixin` | come and go at every step |
| in one go (FLUX.1, Stable Diffusion 3, Wan, Z-Image) | `request_pipelines.REQUEST_MIXINS` | begin and end together |
"""

from __future__ import annotations

from typing import Any

from vllm_omni.diffusion.registry import DiffusionModelRegistry

from verl_digen.patches import vllm_omni_wan_import
from verl_digen.rollout.vllm_omni.request_pipelines import REQUEST_MIXINS
from verl_digen.rollout.vllm_omni.step_mode import STEP_METHODS, StepRecordingMixin

PREFIX = "Recording"
"""What this module puts before the name of a pipeline class."""


def recording_class(name: str) -> type[Any]:
    """vLLM-Omni's pipeline class `name` with a subclass of `RecordingPipeline` over it.

    Raises:
        ValueError: vLLM-Omni has no such pipeline, or none of ours records it.
    """
    if name not in DiffusionModelRegistry.models:
        raise ValueError(
            "actor_rollout_ref.rollout.name=vllm_omni cannot serve actor_rollout_ref.model.path: vLLM-Omni has no "
            f"pipeline {name}; set actor_rollout_ref.rollout.name=diffusers"
        )
    if name == vllm_omni_wan_import.PIPELINE:
        vllm_omni_wan_import.apply()
    pipeline = DiffusionModelRegistry.models[name].load_model_cls()
    if all(hasattr(pipeline, method) for method in STEP_METHODS):
        mixin: type[Any] = StepRecordingMixin
    elif name in REQUEST_MIXINS:
        mixin = REQUEST_MIXINS[name]
    else:
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm_omni cannot serve actor_rollout_ref.model.path: {name} has no step "
            f"execution in vLLM-Omni, and of those without one {', '.join(sorted(REQUEST_MIXINS))} are recorded; set "
            "actor_rollout_ref.rollout.name=diffusers"
        )
    return type(f"{PREFIX}{name}", (mixin, pipeline), {"__module__": __name__})


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    cls = recording_class(name.removeprefix(PREFIX))
    globals()[name] = cls  # one class object per process
    return cls
