# SPDX-License-Identifier: Apache-2.0
"""Formats of an export: folders that other tools read.

| format | trained all weights | trained an adapter |
| --- | --- | --- |
| `diffusers` | `transformer/` (and `transformer_2/`) | `pytorch_lora_weights.safetensors`, for `load_lora_weights` |
| `peft` | - | `adapter_model.safetensors` and `adapter_config.json`, for `PeftModel` |
| `merged` | - | `transformer/` (and `transformer_2/`): base + adapter in fp32, rounded once |
| `comfyui` | - | `lora.safetensors` (`transformer.safetensors` and `transformer_2.safetensors`) |

An adapter of two networks (Wan2.2) is written as two adapters, in folders with the networks' names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import copy
from pathlib import Path

import torch
from peft.tuners.lora import LoraConfig
from torch import Tensor

from verl_digen.engine.export import PEFT_PREFIX
from verl_digen.require import require
from verl_digen.tools.export.comfyui import require_known, save_comfyui, scales_of
from verl_digen.tools.export.folders import save_networks, save_peft_adapter, save_pipeline_adapter
from verl_digen.tools.export.policy import PolicyWeights
from verl_digen.tools.export.saved_run import SavedRun

Write = Callable[[SavedRun, PolicyWeights, Path, torch.dtype | None], None]
"""Writes a policy into an empty folder; the dtype is `PolicyWeights.full`'s."""


def require_fit(run: SavedRun, name: str) -> None:
    """Raise ValueError unless format `name` fits what the run trained."""
    fits, trained = (FORMATS, "an adapter") if run.is_lora else (("diffusers",), "all weights")
    if name == "comfyui":
        require_known(run.model.pipeline)
    require(
        name in fits, f"--format must be one of {', '.join(fits)} for a run that trained {trained}", name, "choose one"
    )


def _write_networks(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    save_networks(weights.network, weights.full(dtype), folder)


def _write_diffusers(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    if not run.is_lora:
        return _write_networks(run, weights, folder, dtype)
    for name, config, tensors in adapters(run, weights, dtype):
        (folder / name).mkdir(exist_ok=True)
        save_pipeline_adapter(config, tensors, folder / name)


def _write_peft(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    for name, config, tensors in adapters(run, weights, dtype):
        save_peft_adapter(config, tensors, folder / name)


def _write_comfyui(run: SavedRun, weights: PolicyWeights, folder: Path, dtype: torch.dtype | None) -> None:
    scales = scales_of(weights)
    for name, _, tensors in adapters(run, weights, dtype):
        save_comfyui(run, name, tensors, scales, folder)


def adapters(
    run: SavedRun, weights: PolicyWeights, dtype: torch.dtype | None = None
) -> Iterator[tuple[str, LoraConfig, dict[str, Tensor]]]:
    """(folder, peft config, tensors under peft's names) of the adapter of each network; folder "" if there is one."""
    tensors = {name: value if dtype is None else value.to(dtype) for name, value in weights.adapter().items()}
    if len(run.model.experts) == 1:
        yield "", weights.adapter_config, tensors
        return
    for expert in run.model.experts:
        prefix = f"{PEFT_PREFIX}{expert}."
        own = {
            f"{PEFT_PREFIX}{name.removeprefix(prefix)}": tensors[name] for name in tensors if name.startswith(prefix)
        }
        if own:
            yield expert, _of_layers(weights.adapter_config, own), own


def _of_layers(config: LoraConfig, tensors: Mapping[str, Tensor]) -> LoraConfig:
    """The config with the layers that have tensors as its targets; a pattern may name the network itself."""
    own = copy(config)
    own.target_modules = sorted({name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in tensors})
    own.exclude_modules = None
    return own


FORMATS: dict[str, Write] = {
    "diffusers": _write_diffusers,
    "peft": _write_peft,
    "merged": _write_networks,
    "comfyui": _write_comfyui,
}
"""Value of --format -> writer. A run that trained all weights has the first alone."""
