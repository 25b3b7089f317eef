# SPDX-License-Identifier: Apache-2.0
"""Which pipelines are generated with vLLM-Omni. Imports nothing of it: asked before Ray starts, on any machine."""

from __future__ import annotations

from verl_digen.schedulers.require import require

SERVED = (
    "FluxPipeline",
    "QwenImagePipeline",
    "StableDiffusion3Pipeline",
    "WanPipeline",
    "ZImagePipeline",
)
"""As `model_index.json` and vLLM-Omni's registry name them; `pipeline.py` has what records each."""


def require_served(pipeline: str) -> None:
    """Raise ValueError unless `pipeline` is one of them."""
    require(
        pipeline in SERVED,
        f"actor_rollout_ref.rollout.name=vllm_omni needs a checkpoint of one of {', '.join(SERVED)}",
        pipeline,
        "set actor_rollout_ref.rollout.name=diffusers",
    )
