# SPDX-License-Identifier: Apache-2.0
"""Weight files of a checkpoint on this machine: all are there, and none was cut short while it was copied."""

from __future__ import annotations

import json
from pathlib import Path

from omegaconf import DictConfig

from verl_digen.models.json_file import read_object
from verl_digen.preflight.pools import VIRTUAL

KEY = "actor_rollout_ref.model.path"
INDEX_SUFFIX = ".safetensors.index.json"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which names each tensor's place behind it."""
MAX_HEADER_BYTES = 10**8


def check_weights(config: DictConfig) -> None:
    """Every network of a local checkpoint has its weight files, whole."""
    path = config.actor_rollout_ref.model.path
    folder = Path(path).expanduser()
    if config.trainer.v1.trainer_mode == VIRTUAL or not folder.is_dir() or not (folder / "model_index.json").is_file():
        return
    for network in sorted(folder.glob("transformer*/config.json")):
        _check_network(network.parent)


def _check_network(folder: Path) -> None:
    names = {file.name for file in folder.glob("*.safetensors")}
    for index in folder.glob(f"*{INDEX_SUFFIX}"):
        named = set(read_object(index, KEY).get("weight_map", {}).values())
        if missing := sorted(named - names):
            raise ValueError(
                f"{KEY} must hold all weight files that {index.name} names, but {str(folder)!r} lacks "
                f"{', '.join(missing[:3])}; complete the download"
            )
    if not names and not any(folder.glob("*.bin")):
        raise ValueError(f"{KEY} must hold weights, but {str(folder)!r} has no *.safetensors; complete the download")
    for name in sorted(names):
        if not _is_whole(folder / name):
            size = (folder / name).stat().st_size
            raise ValueError(
                f"{KEY} must hold whole weight files, got {str(folder / name)!r} with {size} bytes, which was cut "
                "short; download it again"
            )


def _is_whole(file: Path) -> bool:
    """Whether the file is as long as its header says."""
    size = file.stat().st_size
    with open(file, "rb") as content:
        length = int.from_bytes(content.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(size, MAX_HEADER_BYTES):
            return False
        try:
            header = json.loads(content.read(length))
            ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return False
    return size == LENGTH_BYTES + length + max(ends, default=0)
