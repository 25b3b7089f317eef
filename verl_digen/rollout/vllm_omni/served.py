# SPDX-License-Identifier: Apache-2.0
"""Pipelines supported with vLLM-Omni: those whose `ModelSpec.vllm_omni` says how. Does not import vLLM-Omni: used
before Ray starts, on any machine."""

from __future__ import annotations

from verl_digen.models import MODELS, model_class
from verl_digen.models.spec import VllmOmniServing
from verl_digen.require import require


def served_pipelines() -> tuple[str, ...]:
    """Pipelines of `MODELS` that vLLM-Omni serves; imports every model file."""
    return tuple(name for name in MODELS if model_class(name).spec.vllm_omni is not None)


def require_served(pipeline: str) -> VllmOmniServing:
    """How vLLM-Omni serves `pipeline`, a key of `MODELS`. ValueError, which lists those it serves, if it does not."""
    serving = model_class(pipeline).spec.vllm_omni
    if serving is None:
        raise ValueError(
            "actor_rollout_ref.rollout.name=vllm_omni needs a checkpoint of one of "
            f"{', '.join(served_pipelines())}, got {pipeline!r}; set actor_rollout_ref.rollout.name=diffusers"
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
