# SPDX-License-Identifier: Apache-2.0
"""Folders with whole weights for other tools: networks in diffusers' format, adapters in peft's and diffusers'."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY, LORA_WEIGHT_NAME_SAFE
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME, SAFETENSORS_WEIGHTS_NAME
from peft import PeftConfig, PeftModel
from peft.utils import SAFETENSORS_WEIGHTS_NAME as ADAPTER_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from verl_digen.engine.export import PEFT_PREFIX
from verl_digen.models.checkpoint import Experts

MAX_FILE_BYTES = 5 << 30
"""Largest safetensors file of an export; the diffusers library's own limit is 10 GB."""

WRITE_ERRORS = (OSError, SafetensorError)
"""Exceptions on a full disk: safetensors has its own."""


def save_peft_adapter(config: PeftConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter as peft's own `save_pretrained` does, into a folder that is there or is made."""
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / ADAPTER_WEIGHTS_NAME, metadata={"format": "pt"})
    is_inference, config.inference_mode = config.inference_mode, True
    config.save_pretrained(str(folder))
    config.inference_mode = is_inference


def save_pipeline_adapter(config: PeftConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Write an adapter for `pipeline.load_lora_weights(folder)` of diffusers."""
    described = {
        f"transformer.{key}": sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    save_file(
        {f"transformer.{name.removeprefix(PEFT_PREFIX)}": value for name, value in tensors.items()},
        folder / LORA_WEIGHT_NAME_SAFE,
        metadata={"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(described, indent=2, sort_keys=True)},
    )


def save_networks(network: Any, tensors: Iterable[tuple[str, Tensor]], folder: Path) -> None:
    """Write streamed tensors as diffusers folders in `folder`: `transformer`, or one for each expert, by its name.

    Args:
        tensors: for an `Experts`, one expert after the other, names prefixed with the expert's.
    """
    network = network.base_model.model if isinstance(network, PeftModel) else network
    if not isinstance(network, Experts):
        save_transformer(network, tensors, folder / "transformer")
        return
    for expert, named in groupby(tensors, key=lambda named: named[0].partition(".")[0]):
        stripped = ((name.partition(".")[2], tensor) for name, tensor in named)
        save_transformer(network.get_submodule(expert), stripped, folder / expert)


def save_transformer(
    module: Any, tensors: Iterable[tuple[str, Tensor]], folder: Path, *, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write streamed tensors as a diffusers folder; holds at most one file's tensors in memory."""
    folder.mkdir()
    files: list[list[str]] = []
    pending: dict[str, Tensor] = {}
    num_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(files)}.safetensors", metadata={"format": "pt"})
        files.append(list(pending))

    for name, value in tensors:
        if pending and num_bytes + value.nbytes > max_file_bytes:
            flush()
            pending, num_bytes = {}, 0
        pending[name] = value.contiguous()
        num_bytes += value.nbytes
        total_bytes += value.nbytes
    flush()
    _name_files(folder, files, total_bytes)
    module.save_config(folder)


def _name_files(folder: Path, files: list[list[str]], total_bytes: int) -> None:
    """Rename numbered files to the names diffusers expects, which contain their count, and write the index."""
    if len(files) == 1:
        (folder / "0.safetensors").rename(folder / SAFETENSORS_WEIGHTS_NAME)
        return
    stem, suffix = SAFETENSORS_WEIGHTS_NAME.rsplit(".", 1)
    weight_map = {}
    for number, names in enumerate(files):
        file = f"{stem}-{number + 1:05d}-of-{len(files):05d}.{suffix}"
        (folder / f"{number}.safetensors").rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True))
