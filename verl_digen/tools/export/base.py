# SPDX-License-Identifier: Apache-2.0
"""Tensors of the networks of a base checkpoint in the diffusers format, read one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from diffusers.utils.constants import SAFE_WEIGHTS_INDEX_NAME
from safetensors import safe_open
from torch import Tensor

from verl_digen.models.json_file import read_object
from verl_digen.models.locate import VARIANTS
from verl_digen.require import require

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""safetensors' names of floating dtypes."""


class BaseWeights:
    """Tensors of a checkpoint's networks.

    Args:
        path: the checkpoint's folder. networks: folders of its networks; names have the folder's as prefix if there are
            several, as in `Experts`.
    """

    def __init__(self, path: Path, networks: Sequence[str]):
        self._path, self._networks = path, tuple(networks)

    @cached_property
    def _files(self) -> dict[str, tuple[Path, str]]:
        """Name -> (file, name in it)."""
        found: dict[str, tuple[Path, str]] = {}
        for network in self._networks:
            prefix = f"{network}." if len(self._networks) > 1 else ""
            for file in _files_of(self._path / network):
                with safe_open(file, framework="pt") as tensors:
                    found |= {f"{prefix}{name}": (file, name) for name in tensors.keys()}  # noqa: SIM118 - no mapping
        return found

    def tensor(self, name: str) -> Tensor:
        """The tensor `name`, on the CPU.

        Raises:
            ValueError: the checkpoint has none of this name.
        """
        file, inner = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            return tensors.get_tensor(inner)

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which the tensor `name` lies in its file. Raises as `tensor`."""
        file, inner = self._place(name)
        with safe_open(file, framework="pt") as tensors:
            found = tensors.get_slice(inner).get_dtype()
        require(
            found in DTYPES,
            f"{name} of the base checkpoint must have a dtype of {', '.join(DTYPES)} where none is asked for",
            found,
            "give one, e.g. --dtype bf16",
        )
        return DTYPES[found]

    def _place(self, name: str) -> tuple[Path, str]:
        require(
            name in self._files,
            f"the base checkpoint {str(self._path)!r} must hold the network that was trained, with {name}",
            f"{len(self._files)} other tensors",
            "name the right one with --base",
        )
        return self._files[name]


def _files_of(folder: Path) -> list[Path]:
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        names = read_object(index, "actor_rollout_ref.model.path")["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    duplicates = {file for pattern in VARIANTS for file in folder.glob(pattern)}
    files = sorted(set(folder.glob("*.safetensors")) - duplicates)
    others = sorted(file.name for file in folder.glob("*.bin"))
    require(
        bool(files),
        f"{str(folder)!r} must hold weights as safetensors",
        others or "none",
        "name a base with safetensors, --base DIR; `save_pretrained` of diffusers writes them",
    )
    return files
