# SPDX-License-Identifier: Apache-2.0
"""Model files, one per diffusers pipeline, found by the pipeline's class name in a checkpoint's `model_index.json`.

The transformer's class says too little: `FluxPipeline` and `FluxKontextPipeline` have the same one and other inputs.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from verl_digen.models.json_file import read_object

if TYPE_CHECKING:
    from verl_digen.models.base import DiffusionModel

MODELS: dict[str, str] = {
    "FluxPipeline": "verl_digen.models.flux:Flux",
    "HunyuanVideo15Pipeline": "verl_digen.models.hunyuan_video15:HunyuanVideo15",
    "HunyuanVideoPipeline": "verl_digen.models.hunyuan_video:HunyuanVideo",
    "QwenImageEditPlusPipeline": "verl_digen.models.qwen_image_edit:QwenImageEditPlus",
    "QwenImagePipeline": "verl_digen.models.qwen_image:QwenImage",
    "StableDiffusion3Pipeline": "verl_digen.models.sd3:StableDiffusion3",
    "WanPipeline": "verl_digen.models.wan:Wan",
    "ZImagePipeline": "verl_digen.models.z_image:ZImage",
}
"""Pipeline class name -> "module:class" of the model file. A new model adds one line here, and nowhere else."""


def read_pipeline(path: str | Path) -> str:
    """Class name of the diffusers pipeline of the checkpoint in folder `path`, supported or not.

    Raises:
        ValueError: no such folder, or not a diffusers checkpoint.
    """
    index = Path(path) / "model_index.json"
    if not index.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must be a folder with a diffusers model_index.json, got {str(path)!r}; "
            "check the path, or download the checkpoint first (huggingface-cli download REPO --local-dir DIR)"
        )
    name = read_object(index, "actor_rollout_ref.model.path").get("_class_name")
    if not isinstance(name, str):
        raise ValueError(
            "actor_rollout_ref.model.path must hold a model_index.json that names a pipeline of diffusers, got "
            f"_class_name={name!r} in {str(index)!r}; complete the download"
        )
    return name


def model_class(pipeline: str) -> type[DiffusionModel]:
    """The model file's class for a diffusers pipeline; imports the file, and torch and diffusers with it.

    Raises:
        ValueError: a pipeline without a model file; lists those that have one.
    """
    if pipeline not in MODELS:
        raise ValueError(
            f"actor_rollout_ref.model.path must hold a checkpoint of one of {', '.join(MODELS)}, got a {pipeline}, "
            "which is not supported: it may have the transformer of one that is, but not its inputs; choose another "
            "checkpoint"
        )
    module, _, name = MODELS[pipeline].partition(":")
    return getattr(importlib.import_module(module), name)


def load_model(path: str | Path) -> DiffusionModel:
    """The model object for the checkpoint in `path`; loads no weights.

    Raises:
        ValueError: a missing or incomplete checkpoint, or one of a pipeline without a model file.
    """
    return model_class(read_pipeline(path))(path)
