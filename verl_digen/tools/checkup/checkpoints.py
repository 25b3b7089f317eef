# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a published size with random weights.

Configs are the published ones. The transformer's weights are drawn where it is loaded (`models.checkpoint`), those
of the encoders and the VAE are written.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_digen.models.checkpoint import RANDOM_MARKER, draw_weight
from verl_digen.models.published import write_configs


@dataclass(frozen=True)
class TrueSize:
    """A checkpoint that can be made."""

    repository: str
    dtype: str
    """Dtype of the weights that are written, as a name of torch."""
    tokenizers: Callable[[], dict[str, Any]]
    """Folder -> tokenizer; small ones that take any text."""
    text_layers: int | None = None
    """Layers of the text encoder, if not all: what it takes of the host's memory is not the question then."""


def _sd3_tokenizers() -> dict[str, Any]:
    from verl_digen.models.tiny.encoders import clip_tokenizer, t5_tokenizer

    return {"tokenizer": clip_tokenizer(), "tokenizer_2": clip_tokenizer(), "tokenizer_3": t5_tokenizer()}


def _qwen_tokenizers() -> dict[str, Any]:
    from verl_digen.models.tiny.qwen_image import tokenizer

    return {"tokenizer": tokenizer()}


TRUE_SIZES = {
    "sd3": TrueSize("stabilityai/stable-diffusion-3.5-medium", "float16", _sd3_tokenizers),
    "qwen_image": TrueSize("Qwen/Qwen-Image", "bfloat16", _qwen_tokenizers, text_layers=1),
}


def write_checkpoint(name: str, folder: Path) -> Path:
    """Write checkpoint `name`, unless it is there."""
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        _write(TRUE_SIZES[name], unfinished)
        unfinished.rename(folder)
    return folder


def _write(size: TrueSize, folder: Path) -> None:
    write_configs(size.repository, folder)
    index = json.loads((folder / "model_index.json").read_text())
    for name, tokenizer in size.tokenizers().items():
        tokenizer.save_pretrained(folder / name)
        index[name] = ["transformers", type(tokenizer).__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    for file in sorted(folder.glob("*/config.json")):
        config = json.loads(file.read_text())
        if file.parent.name.startswith("text_encoder") and size.text_layers is not None:
            config = _with_layers(config, size.text_layers)
        file.write_text(json.dumps(config))
        if file.parent.name.startswith("transformer"):
            (file.parent / RANDOM_MARKER).write_text("drawn by verl_digen/models/checkpoint.py\n")
        else:
            _write_weights(file.parent, config, size.dtype)


def _with_layers(config: dict[str, Any], number: int) -> dict[str, Any]:
    """The config of a network with `number` layers of each kind."""
    config = dict(config)
    for name in ("num_hidden_layers", "depth"):
        if name in config:
            config[name] = min(config[name], number)
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:number]
    if "fullatt_block_indexes" in config:
        config["fullatt_block_indexes"] = [layer for layer in config["fullatt_block_indexes"] if layer < number] or [0]
    for name in ("text_config", "vision_config"):
        if name in config:
            config[name] = _with_layers(config[name], number)
    return config


def _write_weights(folder: Path, config: dict[str, Any], dtype_name: str) -> None:
    import diffusers
    import torch
    import transformers
    from accelerate import init_empty_weights
    from safetensors.torch import save_file

    with init_empty_weights(include_buffers=False):
        if "_class_name" in config:
            network, stem = getattr(diffusers, config["_class_name"]).from_config(config), "diffusion_pytorch_model"
        else:
            made = transformers.AutoConfig.for_model(**config)
            network, stem = getattr(transformers, config["architectures"][0])(made), "model"
    tied = set(getattr(network, "_tied_weights_keys", None) or ())
    dtype = getattr(torch, dtype_name)
    tensors = {
        name: draw_weight(name, tensor.shape, dtype) if tensor.is_meta else tensor
        for name, tensor in network.state_dict().items()
        if name not in tied
    }
    save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
