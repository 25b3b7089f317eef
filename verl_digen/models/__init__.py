# SPDX-License-Identifier: Apache-2.0
"""Model files, one per diffusers pipeline, found by the pipeline's class name in a checkpoint's `model_index.json`.

The transformer's class says too little: `FluxPipeline` and `FluxKontextPipeline` have the same one and other inputs.
"""

import importlib
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from verl_digen.models.locate import read_object
from verl_digen.require import check_class, refusing, require

if TYPE_CHECKING:
    from verl_digen.models.base import DiffusionModel

MODELS: dict[str, str] = {
    "Flux2KleinPipeline": "verl_digen.models.flux2_klein:Flux2Klein",
    "FluxKontextPipeline": "verl_digen.models.flux_kontext:FluxKontext",
    "FluxPipeline": "verl_digen.models.flux:Flux",
    "HunyuanVideo15ImageToVideoPipeline": "verl_digen.models.hunyuan_video15_image:HunyuanVideo15ImageToVideo",
    "HunyuanVideo15Pipeline": "verl_digen.models.hunyuan_video15:HunyuanVideo15",
    "HunyuanVideoPipeline": "verl_digen.models.hunyuan_video:HunyuanVideo",
    "LTX2Pipeline": "verl_digen.models.ltx2:LTX2",
    "QwenImage21Pipeline": "verl_digen.models.qwen_image21:QwenImage21",
    "QwenImageEditPipeline": "verl_digen.models.qwen_image_edit:QwenImageEdit",
    "QwenImageEditPlusPipeline": "verl_digen.models.qwen_image_edit:QwenImageEditPlus",
    "QwenImagePipeline": "verl_digen.models.qwen_image:QwenImage",
    "StableDiffusion3Pipeline": "verl_digen.models.sd3:StableDiffusion3",
    "WanImageToVideoPipeline": "verl_digen.models.wan_image:WanImageToVideo",
    "WanPipeline": "verl_digen.models.wan:Wan",
    "ZImagePipeline": "verl_digen.models.z_image:ZImage",
}
"""Pipeline class name -> "module:class" of the model file. A new model adds one line here, and nowhere else."""

VARIANTS: dict[str, tuple[str, str]] = {
    "WanImageToVideoPipeline": ("expand_timesteps", "verl_digen.models.wan_first_frame:WanFirstFrame"),
    "WanPipeline": ("expand_timesteps", "verl_digen.models.wan_first_frame:WanFirstFrame"),
}
"""Pipeline class name -> (key of `model_index.json`, "module:class" of the model file for checkpoints where it is
true)."""

NEEDS = {"LTX2Pipeline": ("transformers", ">=5.10,<5.11"), "QwenImage21Pipeline": ("diffusers", ">=0.41,<0.43")}
"""Pipeline class name -> (package, versions) without which its file cannot be imported, where they are not all of
`verl_digen.hardware.versions`."""


def pipelines_of(model: type) -> list[str]:
    """Pipelines whose files have `model`, or a class that it extends; the nearest first."""
    of_file = {file: pipeline for pipeline, file in MODELS.items()}
    files = (f"{each.__module__}:{each.__name__}" for each in model.__mro__)
    return [of_file[file] for file in files if file in of_file]


def is_importable(pipeline: str) -> bool:
    """True if the installed packages are new enough for the file of this pipeline."""
    package, versions = NEEDS.get(pipeline, ("diffusers", ""))
    return SpecifierSet(versions.partition(",")[0]).contains(version(package), prereleases=True)


def read_index(path: str | Path) -> dict[str, Any]:
    """Content of the `model_index.json` of the checkpoint in folder `path`. ValueError if there is no such folder, or
    it is not a diffusers checkpoint."""
    index = Path(path) / "model_index.json"
    if Path(path).is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must be a folder in the diffusers format, got a file, {str(path)!r}; "
            'convert it once, e.g. python -c "from diffusers import StableDiffusion3Pipeline as P; P.from_single_file('
            f"{str(path)!r}, config='stabilityai/stable-diffusion-3.5-medium').save_pretrained('DIR')\", and give DIR"
        )
    if not index.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must be a folder with a diffusers model_index.json, got {str(path)!r}; "
            "check the path, or download the checkpoint first (hf download REPO --local-dir DIR)"
        )
    found = read_object(index, "actor_rollout_ref.model.path")
    name = found.get("_class_name")
    if not isinstance(name, str):
        raise ValueError(
            "actor_rollout_ref.model.path must hold a model_index.json that names a pipeline of diffusers, got "
            f"_class_name={name!r} in {str(index)!r}; complete the download"
        )
    return found


def model_class(pipeline: str, index: Mapping[str, Any] | None = None) -> "type[DiffusionModel]":
    """The model file's class for a diffusers pipeline; imports the file, and torch and diffusers with it. `index`:
    content of the checkpoint's `model_index.json`, which may name a variant; None: the class in `MODELS`. ValueError
    for a pipeline without a model file (lists those that have one), or one that needs a newer package."""
    if pipeline not in MODELS:
        raise ValueError(
            f"actor_rollout_ref.model.path must hold a checkpoint of one of {', '.join(MODELS)}, got a {pipeline}, "
            "which is not supported: it may have the transformer of one that is, but not its inputs; choose another "
            "checkpoint"
        )
    package, versions = NEEDS.get(pipeline, ("diffusers", ""))
    rule = f"{package} must be {versions.partition(',')[0]} for {pipeline}"
    require(is_importable(pipeline), rule, version(package), f"pip install '{package}{versions}'")
    key, variant = VARIANTS.get(pipeline, ("", ""))
    is_variant = bool(variant and index and index.get(key))
    target, place = variant if is_variant else MODELS[pipeline], f"MODELS[{pipeline!r}]"
    remedy = "repair it, or put its folder on PYTHONPATH on every node"
    with refusing(f"{place} must be MODULE:CLASS that can be imported", target, remedy):
        module, name = target.split(":")
        found = getattr(importlib.import_module(module), name)
    return check_class(found, importlib.import_module(f"{__name__}.base").DiffusionModel, place)


def load_model(path: str | Path) -> "DiffusionModel":
    """The model object for the checkpoint in `path`; loads no weights. ValueError for a missing or incomplete
    checkpoint, or one of a pipeline without a model file."""
    index = read_index(path)
    return model_class(index["_class_name"], index)(path)
