# SPDX-License-Identifier: Apache-2.0
"""Files of a teacher (`digen.loss.teachers.NAME.path`): what is in the folder, and its weights by the network's names.

| the folder holds | the teacher is |
| --- | --- |
| `adapter_config.json` | peft's LoRA adapter |
| `pytorch_lora_weights.safetensors` | diffusers' LoRA adapter |
| `config.json` and `*.safetensors` | one network |
| a folder for each network of the run's model (`transformer`) | a pipeline, or an export's networks |
| a folder `lora_adapter` | an export's adapter |

Reading the folder reads headers alone; `TeacherFiles.load` reads one parameter.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from torch import Tensor

from verl_digen.models.json_file import read_object
from verl_digen.require import require

ADAPTER_CONFIG = "adapter_config.json"
DIFFUSERS_LORA = "pytorch_lora_weights.safetensors"
DIFFUSERS_METADATA = "lora_adapter_metadata"
EXPORTED_ADAPTER = "lora_adapter"
PREFIXES = ("base_model.model.", "transformer.")
"""Prefixes of an adapter's tensors in peft's and in diffusers' format."""
DOWN, UP = ("lora_A.default.weight", "lora_A.weight"), ("lora_B.default.weight", "lora_B.weight")
PLAIN = {"use_dora": False, "bias": "none", "modules_to_save": None, "target_parameters": None, "lora_bias": False}
"""peft settings that change what an adapter computes -> the value that is supported."""

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter of the network -> its shape."""


@dataclass(frozen=True)
class Stored:
    """One tensor in a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]

    def read(self) -> Tensor:
        """The tensor, on the CPU."""
        with safe_open(self.file, framework="pt") as opened:
            return opened.get_tensor(self.name)


class TeacherFiles(Protocol):
    """Weights of a teacher."""

    @property
    def adds(self) -> bool:
        """True if its weights are added to those of the run's checkpoint."""
        ...

    def check(self, network: Shapes, key: str) -> None:
        """Require weights of this network; ValueError names a parameter and `key`."""
        ...

    def changed(self, parameters: Iterable[str]) -> Sequence[str]:
        """Select those of these parameters in which the teacher may differ from the run's checkpoint."""
        ...

    def load(self, name: str) -> Tensor | None:
        """The teacher's parameter `name`, or what is added to the checkpoint's, on the CPU; None: it is the
        checkpoint's."""
        ...


@dataclass(frozen=True)
class FullTeacher:
    """All weights of the network."""

    tensors: Mapping[str, Stored]
    adds = False

    def check(self, network: Shapes, key: str) -> None:
        _check_names(network.keys() - self.tensors.keys(), "lacks", key)
        _check_names(self.tensors.keys() - network.keys(), "has, and the run's network has not,", key)
        for name, shape in network.items():
            _check_shape(name, self.tensors[name].shape, shape, key)

    def changed(self, parameters: Iterable[str]) -> Sequence[str]:
        return list(parameters)

    def load(self, name: str) -> Tensor | None:
        return self.tensors[name].read()


@dataclass(frozen=True)
class LowRank:
    """The adapter of one linear layer: scale * up @ down is added to its weight."""

    down: Stored
    """[r, in]."""
    up: Stored
    """[out, r]."""
    scale: float


@dataclass(frozen=True)
class AdapterTeacher:
    """A LoRA adapter on the run's checkpoint."""

    layers: Mapping[str, LowRank]
    """Weight of the network -> what is added to it."""
    adds = True

    def check(self, network: Shapes, key: str) -> None:
        _check_names(self.layers.keys() - network.keys(), "has, and the run's network has not,", key)
        for name, layer in self.layers.items():
            require(
                layer.down.shape[0] == layer.up.shape[1],
                f"{key} must hold two factors of one rank for {name}",
                (layer.down.shape, layer.up.shape),
                "save the adapter again",
            )
            _check_shape(name, (layer.up.shape[0], layer.down.shape[1]), network[name], key)

    def changed(self, parameters: Iterable[str]) -> Sequence[str]:
        return [name for name in parameters if name in self.layers]

    def load(self, name: str) -> Tensor | None:
        if name not in self.layers:
            return None
        layer = self.layers[name]
        return layer.scale * (layer.up.read().float() @ layer.down.read().float())


def read_teacher(path: str, key: str, networks: Sequence[str]) -> TeacherFiles:
    """Read the headers of a teacher's files.

    Args:
        path: local folder.
        key: its key as typed.
        networks: folders of the run's networks in a pipeline, e.g. ("transformer",).

    Raises:
        ValueError: there is no such folder, or no teacher in it.
    """
    folder = Path(path).expanduser()
    require(folder.is_dir(), f"{key} must be a folder on this machine", path, "download it first, or correct the path")
    if (folder / ADAPTER_CONFIG).is_file():
        return _read_peft(folder, key)
    if (folder / DIFFUSERS_LORA).is_file():
        return _read_diffusers(folder / DIFFUSERS_LORA, key)
    if (folder / EXPORTED_ADAPTER).is_dir():
        return read_teacher(str(folder / EXPORTED_ADAPTER), key, networks)
    if (folder / "config.json").is_file() and len(networks) == 1:
        return FullTeacher(_stored(folder, key))
    if all((folder / network).is_dir() for network in networks):
        of_each = {network: _stored(folder / network, key) for network in networks}
        if len(networks) == 1:
            return FullTeacher(of_each[networks[0]])
        return FullTeacher(
            {f"{network}.{name}": tensor for network, found in of_each.items() for name, tensor in found.items()}
        )
    raise ValueError(
        f"{key} must hold a LoRA adapter ({ADAPTER_CONFIG} or {DIFFUSERS_LORA}), a network (config.json), or the "
        f"folders {', '.join(networks)}, got {path!r} with none of them; give the folder of an export or of a download"
    )


def _stored(folder: Path, key: str, pattern: str = "*.safetensors") -> dict[str, Stored]:
    """Tensors of the safetensors in `folder`, by name."""
    found: dict[str, Stored] = {}
    for file in sorted(folder.glob(pattern)):
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                found |= {name: Stored(file, name, tuple(opened.get_slice(name).get_shape())) for name in names}
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{key} must hold whole safetensors files, got {str(file)!r} ({error}); copy or download it again"
            ) from error
    require(bool(found), f"{key} must hold weights in {pattern}", str(folder), "save them as safetensors")
    return found


def _read_peft(folder: Path, key: str) -> AdapterTeacher:
    config = read_object(folder / ADAPTER_CONFIG, key)
    return AdapterTeacher(_layers(_stored(folder, key, "adapter_model.safetensors"), config, key))


def _read_diffusers(file: Path, key: str) -> AdapterTeacher:
    """diffusers' format: with its settings in the header, or without any, where scale is 1."""
    stored = _stored(file.parent, key, file.name)
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata() or {}
    config: Any = json.loads(metadata[DIFFUSERS_METADATA]) if DIFFUSERS_METADATA in metadata else {}
    prefix = "transformer."
    return AdapterTeacher(_layers(stored, {name.removeprefix(prefix): value for name, value in config.items()}, key))


def _layers(stored: Mapping[str, Stored], config: Mapping[str, Any], key: str) -> dict[str, LowRank]:
    """Layers of an adapter.

    Args:
        config: peft's settings; {} scales by 1.
    """
    for name, value in PLAIN.items():
        given = config.get(name, value)
        require(
            given == value or not given,
            f"{key} must hold a plain LoRA adapter, with {name}={value}",
            given,
            "merge it into its base model and give the whole network",
        )
    parts: dict[str, dict[str, Stored]] = {}
    for name, tensor in stored.items():
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        layer, kind = _split(name.removeprefix(prefix))
        require(
            kind != "" and len(tensor.shape) == 2,
            f"{key} must hold the factors lora_A and lora_B of linear layers alone",
            f"{name} {list(tensor.shape)}",
            "convert it to peft's format, or merge it into its base model and give the whole network",
        )
        parts.setdefault(layer, {})[kind] = tensor
    layers = {}
    for layer, pair in parts.items():
        require(len(pair) == 2, f"{key} must hold both factors of {layer}", sorted(pair), "save the adapter again")
        layers[f"{layer}.weight"] = LowRank(pair["down"], pair["up"], _scale(config, layer, pair["down"].shape[0]))
    return layers


def _split(name: str) -> tuple[str, str]:
    """(layer, "down" or "up"); "" for another tensor."""
    for kind, endings in (("down", DOWN), ("up", UP)):
        for ending in endings:
            if name.endswith(f".{ending}"):
                return name.removesuffix(f".{ending}"), kind
    return name, ""


def _scale(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """Factor of a layer's delta: alpha / r, or with rank-stabilised LoRA alpha / sqrt(r)."""
    if "lora_alpha" not in config:
        return 1.0
    alpha = float(config["lora_alpha"])
    for pattern, value in config.get("alpha_pattern", {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):  # as peft reads it
            alpha = float(value)
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _check_names(names: set[str], problem: str, key: str) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            f"{key} must hold weights of the network of actor_rollout_ref.model.path, but it {problem} "
            f"{min(names)}{more}; a teacher has the student's architecture"
        )


def _check_shape(name: str, found: tuple[int, ...], needed: tuple[int, ...], key: str) -> None:
    require(
        found == needed,
        f"{key} must hold {name} in the shape {list(needed)}, that of actor_rollout_ref.model.path",
        list(found),
        "a teacher has the student's architecture",
    )
