# SPDX-License-Identifier: Apache-2.0
"""Pipelines supported with vLLM-Omni. Does not import vLLM-Omni: used before Ray starts, on any machine."""

from __future__ import annotations

from verl_digen.require import require

SERVED = (
    "FluxPipeline",
    "HunyuanVideo15Pipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline",
    "ZImagePipeline",
)
"""Names in `model_index.json` and in vLLM-Omni's registry; `pipeline.py` has the recording class of each."""

STEPWISE = frozenset({"QwenImagePipeline"})
"""Pipelines of `SERVED` that vLLM-Omni runs step by step; the others run in one call per batch."""

UNADAPTED = {"HunyuanVideo15Pipeline": "refiner_blocks"}
"""Pipeline -> part of the names of layers that LoRA wraps by default but to which vLLM-Omni binds no adapter, because
it uses diffusers' own implementation of them."""


def require_served(pipeline: str) -> None:
    """Raise ValueError unless `pipeline` is in `SERVED`."""
    require(
        pipeline in SERVED,
        f"actor_rollout_ref.rollout.name=vllm_omni needs a checkpoint of one of {', '.join(SERVED)}",
        pipeline,
        "set actor_rollout_ref.rollout.name=diffusers",
    )


def require_bound(pipeline: str, *, sends_adapter: bool, targets: object, excluded: object) -> None:
    """Raise ValueError if updates send an adapter with layers to which vLLM-Omni's `pipeline` cannot bind it.

    Args:
        targets, excluded: `target_modules` and `exclude_modules` of `actor_rollout_ref.model`. If either is set, this
            check passes; a module that is still unbound is an error at the first request.
    """
    if pipeline in UNADAPTED and sends_adapter and targets is None:
        require(
            excluded is not None,
            f"actor_rollout_ref.model.exclude_modules must leave out {UNADAPTED[pipeline]} for an adapter on a "
            f"{pipeline} of actor_rollout_ref.rollout.name=vllm_omni",
            excluded,
            f"set it to '.*{UNADAPTED[pipeline]}.*', or actor_rollout_ref.model.lora.merge=true",
        )
