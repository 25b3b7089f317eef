# SPDX-License-Identifier: Apache-2.0
"""Which pipelines are generated with vLLM-Omni. Imports nothing of it: asked before Ray starts, on any machine."""

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
"""As `model_index.json` and vLLM-Omni's registry name them; `pipeline.py` has what records each."""

STEPWISE = frozenset({"QwenImagePipeline"})
"""Pipelines of `SERVED` that vLLM-Omni runs step by step; the others run in one go."""

UNADAPTED = {"HunyuanVideo15Pipeline": "refiner_blocks"}
"""Pipeline -> part of the names of layers that LoRA wraps unless told otherwise, and to which vLLM-Omni binds no
adapter, because they are diffusers' own there."""


def require_served(pipeline: str) -> None:
    """Raise ValueError unless `pipeline` is one of them."""
    require(
        pipeline in SERVED,
        f"actor_rollout_ref.rollout.name=vllm_omni needs a checkpoint of one of {', '.join(SERVED)}",
        pipeline,
        "set actor_rollout_ref.rollout.name=diffusers",
    )


def require_bound(pipeline: str, *, sends_adapter: bool, targets: object, excluded: object) -> None:
    """Raise ValueError if updates send an adapter with layers that `pipeline` binds none to.

    Args:
        targets, excluded: `target_modules` and `exclude_modules` of `actor_rollout_ref.model`. Whoever sets one of them
            is not asked again; what remains unbound is an error of the first request.
    """
    if pipeline in UNADAPTED and sends_adapter and targets is None:
        require(
            excluded is not None,
            f"actor_rollout_ref.model.exclude_modules must leave out {UNADAPTED[pipeline]} for an adapter on a "
            f"{pipeline} of actor_rollout_ref.rollout.name=vllm_omni",
            excluded,
            f"set it to '.*{UNADAPTED[pipeline]}.*', or actor_rollout_ref.model.lora.merge=true",
        )
