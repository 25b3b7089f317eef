# SPDX-License-Identifier: Apache-2.0
"""Model files, one per architecture, found by the transformer's class name in a checkpoint's `model_index.json`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from verl_digen.models.json_file import read_object

if TYPE_CHECKING:
    from verl_digen.models.base import DiffusionModel

ARCHITECTURES: dict[str, str] = {
    "FluxTransformer2DModel": "verl_digen.models.flux:Flux",
    "HunyuanVideo15Transformer3DModel": "verl_digen.models.hunyuan_video15:HunyuanVideo15",
    "HunyuanVideoTransformer3DModel": "verl_digen.models.hunyuan_video:HunyuanVideo",
    "QwenImageTransformer2DModel": "verl_digen.models.qwen_image:QwenImage",
    "SD3Transformer2DModel": "verl_digen.models.sd3:StableDiffusion3",
    "WanTransformer3DModel": "verl_digen.models.wan:Wan",
    "ZImageTransformer2DModel": "verl_digen.models.z_image:ZImage",
}
"""Transformer class name -> "module:class" of the model file. A new model adds one line here."""


def read_architecture(path: str | Path) -> str:
    """The transformer's class name of the diffusers checkpoint in folder `path`.

    Raises:
        ValueError: no such folder, or not a diffusers checkpoint.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must be a folder with a diffusers model_index.json, got {str(path)!r}; "
            "check the path, or download the checkpoint first (huggingface-cli download REPO --local-dir DIR)"
        )
    entry = read_object(index, "actor_rollout_ref.model.path").get("transformer")
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], str)):
        raise ValueError(
            f"actor_rollout_ref.model.path must hold a pipeline with a transformer, but {index} lists none; "
            "U-Net pipelines are not supported"
        )
    return entry[1]


def load_model(path: str | Path) -> DiffusionModel:
    """The model object for the checkpoint in `path`; loads no weights.

    Raises:
        ValueError: missing checkpoint or an architecture without a model file; lists the known ones.
    """
    architecture = read_architecture(path)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"actor_rollout_ref.model.path={str(path)!r} holds a {architecture}, which has no model file; "
            f"known architectures: {', '.join(sorted(ARCHITECTURES))}"
        )
    module, _, name = ARCHITECTURES[architecture].partition(":")
    return getattr(importlib.import_module(module), name)(path)
