# SPDX-License-Identifier: Apache-2.0
"""A checkpoint folder in the diffusers format: its configs and its networks.

- Errors name `actor_rollout_ref.model.path`, the key of the folder.
- A network has the same dtypes as from diffusers' own loader, however it is filled: modules that the class keeps in
  fp32 stay fp32, and so do tables that no checkpoint holds.

Invariant (tests/models): the meta network filled with the loaded one's state dict equals it in values, dtypes and
tables.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import init_empty_weights
from torch import nn

from verl_digen.models import random_weights
from verl_digen.models.json_file import read_object


def read_config(path: Path, name: str) -> dict[str, Any]:
    """Read the JSON file `name` of the checkpoint in `path`.

    Raises:
        ValueError: the file is missing or damaged.
    """
    file = path / name
    if not file.is_file():
        raise ValueError(
            f"actor_rollout_ref.model.path must hold {name}, but {str(path)!r} has none; complete the download"
        )
    return read_object(file, "actor_rollout_ref.model.path")


def read_network_config(path: Path, folder: str) -> dict[str, Any]:
    """Constructor arguments of the diffusers network in `folder`: the config file's, and the class's defaults for
    arguments that an older file lacks; the network is built with the same ones."""
    config = read_config(path, f"{folder}/config.json")
    if not hasattr(diffusers, name := str(config.get("_class_name"))):
        raise ValueError(
            f"actor_rollout_ref.model.path must hold a {folder}/config.json that names a network of diffusers, got "
            f"_class_name={name} in {str(path)!r}; complete the download"
        )
    arguments = inspect.signature(getattr(diffusers, name).__init__).parameters.values()
    defaults = {argument.name: argument.default for argument in arguments if argument.default is not argument.empty}
    return defaults | config


def check_components(path: Path, index: dict[str, Any], needed: tuple[str, ...]) -> None:
    """Check that every component in the pipeline's index has its folder, and that the index has all of `needed`.

    Raises:
        ValueError: lists what is missing.
    """
    listed = {name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None}
    absent = sorted(name for name in {*listed, *needed} if name not in listed or not (path / name).is_dir())
    if absent:
        raise ValueError(
            f"actor_rollout_ref.model.path must hold all parts of its {index['_class_name']}, but {str(path)!r} lacks "
            f"{', '.join(absent)}; complete the download"
        )


def load_network(folder: Path, architecture: str, dtype: torch.dtype) -> nn.Module:
    """Load the diffusers network in `folder`, in eval mode on the CPU."""
    if (folder / random_weights.MARKER).exists():
        return random_weights.fill(make_meta_network(folder, architecture, dtype))
    return getattr(diffusers, architecture).from_pretrained(folder, dtype=dtype, low_cpu_mem_usage=True).eval()


def make_meta_network(folder: Path, architecture: str, dtype: torch.dtype) -> nn.Module:
    """Build the network without weights: parameters on the meta device, buffers and tables real, on the CPU."""
    network = getattr(diffusers, architecture)
    with init_empty_weights(include_buffers=False):
        module = network.from_config(network.load_config(folder)).eval()
    for name, tensor in module.state_dict(keep_vars=True).items():  # without tables that no checkpoint holds
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(_dtype_of(name, architecture, dtype))
    return module


def kept_in_fp32(name: str, architecture: str) -> bool:
    """True if diffusers loads the parameter `name` in fp32 for any requested dtype."""
    return not set(getattr(diffusers, architecture)._keep_in_fp32_modules or ()).isdisjoint(name.split("."))


def in_one_dtype(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The network, with all parameters in `dtype`, those that diffusers keeps in fp32, too."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    return network


def _dtype_of(name: str, architecture: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if kept_in_fp32(name, architecture) else dtype
