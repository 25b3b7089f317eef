# SPDX-License-Identifier: Apache-2.0
"""Weight files of a checkpoint on this machine: those of every part have names that are read, all are there and none is
truncated; those of the networks that train hold the tensors that the configuration beside them describes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig

from verl_digen.models.json_file import read_object
from verl_digen.models.locate import INDEX
from verl_digen.models.random_weights import MARKER
from verl_digen.require import require

KEY = "actor_rollout_ref.model.path"
INDEX_SUFFIX = ".safetensors.index.json"
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header, which names each tensor's place behind it."""
MAX_HEADER_BYTES = 10**8
WEIGHTLESS = re.compile("Tokenizer|Processor|Extractor|Scheduler|Guider|Guidance")
"""Classes of parts of a pipeline without weights."""
MIN_BIN_BYTES = 1000
"""A pickle of less is a pointer of Git LFS."""


def check_weights(config: DictConfig) -> None:
    """Require every part of a local checkpoint to have its weight files, whole, and networks their own tensors."""
    path = config.actor_rollout_ref.model.path
    folder = Path(path).expanduser()
    if not folder.is_dir() or not (folder / INDEX).is_file():
        return
    index = read_object(folder / INDEX, KEY).items()
    listed = {name for name, entry in index if isinstance(entry, list) and entry[0] and not WEIGHTLESS.search(entry[1])}
    for part in sorted(folder.glob("*/config.json")):
        trains = part.parent.name.startswith("transformer")
        if not (trains or part.parent.name in listed) or (part.parent / MARKER).exists():
            continue
        shapes = _shapes_in_files(part.parent)
        _check_plain(part, "weights that train" if trains else "encoders in plain weights")
        if trains and shapes:
            _check_tensors(part, shapes)


def _check_plain(config: Path, what: str) -> None:
    """Require weights that are not quantised."""
    method = read_object(config, KEY).get("quantization_config")
    require(
        method is None,
        f"{KEY} must hold {what}, but {str(config)!r} has a quantization_config",
        method,
        "take the checkpoint that it was made of; digen.sampling.outside.fp8 and dtypes save memory",
    )


def _shapes_in_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensors of the safetensors in `folder`; none where the weights have another format."""
    every = {file.name for file in folder.glob("*.safetensors")}
    names = {name for name in every if "." not in name.removesuffix(".safetensors")}  # x.fp16.safetensors is a variant
    if not names and every and not any(folder.glob("*.bin")):
        raise ValueError(
            f"{KEY} must hold weights without a variant in the names of their files, but {str(folder)!r} has "
            f"{', '.join(sorted(every)[:3])} alone; download the others, or rename these"
        )
    for index in folder.glob(f"*{INDEX_SUFFIX}"):
        named = set(read_object(index, KEY).get("weight_map", {}).values())
        if missing := sorted(named - names):
            raise ValueError(
                f"{KEY} must hold all weight files that {index.name} names, but {str(folder)!r} lacks "
                f"{', '.join(missing[:3])}; complete the download"
            )
    if not names and not any(folder.glob("*.bin")):
        raise ValueError(f"{KEY} must hold weights, but {str(folder)!r} has no *.safetensors; complete the download")
    for file in folder.glob("*.bin") if not names else ():
        if file.stat().st_size < MIN_BIN_BYTES:
            raise _cut(file)
    shapes: dict[str, tuple[int, ...]] = {}
    for name in sorted(names):
        of_file = shapes_of(folder / name)
        if of_file is None:
            raise _cut(folder / name)
        shapes |= of_file
    return shapes


def _cut(file: Path) -> ValueError:
    return ValueError(
        f"{KEY} must hold whole weight files, got {str(file)!r} with {file.stat().st_size} bytes, which was cut short; "
        "download it again"
    )


def shapes_of(file: Path) -> dict[str, tuple[int, ...]] | None:
    """Tensors that the file's header names; None if the file's length is not what the header says."""
    size = file.stat().st_size
    with open(file, "rb") as content:
        length = int.from_bytes(content.read(LENGTH_BYTES), "little")
        if not 0 < length <= min(size, MAX_HEADER_BYTES):
            return None
        try:
            header = json.loads(content.read(length))
            tensors = {name: tensor for name, tensor in header.items() if name != "__metadata__"}
            end = max((tensor["data_offsets"][1] for tensor in tensors.values()), default=0)
            shapes = {name: tuple(tensor["shape"]) for name, tensor in tensors.items()}
        except (ValueError, LookupError, TypeError, AttributeError):
            return None
    return shapes if size == LENGTH_BYTES + length + end else None


def _check_tensors(config: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Require the weights of the network that `config` describes: diffusers would draw missing ones at random."""
    try:
        text = config.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return  # reported by `check_model`
    expected = dict(_expected(config.parent, text))
    for problem, names in (
        ("has no weights for", sorted(expected.keys() - shapes.keys())),
        ("has weights that the network lacks:", sorted(shapes.keys() - expected.keys())),
        (
            "has other shapes for",
            sorted(name for name in expected.keys() & shapes.keys() if expected[name] != shapes[name]),
        ),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ValueError(
                f"{KEY} must hold the weights of the network in its {config.parent.name}/config.json, but "
                f"{str(config.parent)!r} {problem} {', '.join(names[:3])}{more}; take both from the same checkpoint"
            )


@lru_cache(maxsize=4)
def _expected(folder: Path, text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Tensors of the network with this configuration, by name."""
    import torch

    from verl_digen.models.checkpoint import make_meta_network

    try:
        network = make_meta_network(folder, str(json.loads(text)["_class_name"]), torch.float32)
    except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{KEY} must hold the configuration of a network, got {str(folder / 'config.json')!r}, which describes "
            f"none ({type(error).__name__}: {str(error).splitlines()[0]}); complete the download"
        ) from error
    return tuple((name, tuple(tensor.shape)) for name, tensor in network.state_dict().items())
