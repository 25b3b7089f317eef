# SPDX-License-Identifier: Apache-2.0
"""Files of a checkpoint on this machine: every part's have names that are read, all exist, and none is a
pointer or truncated; files of diffusers' networks hold the tensors that the configuration beside them describes."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open

from verl_digen.models.checkpoint import RANDOM_MARKER, make_meta_network
from verl_digen.models.locate import INDEX, read_object
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import first_of, refusing, require

KEY = "actor_rollout_ref.model.path"
INDEX_SUFFIX = ".safetensors.index.json"
WEIGHTLESS = re.compile("Tokenizer|Processor|Extractor|Scheduler|Guider|Guidance")
"""Classes of parts of a pipeline without weights."""
STEMS = {"transformers": ("model", "pytorch_model")}
"""Library of a part -> the names under which it reads safetensors and pickles; `OF_DIFFUSERS` for any other."""
OF_DIFFUSERS = ("diffusion_pytorch_model", "diffusion_pytorch_model")
VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", "*.model", "*.tiktoken")
"""Files of which a tokenizer needs one; transformers makes one without any, which reads every text as nothing."""
READS_TEXT = re.compile("(?<!ByT5)Tokenizer|VLProcessor")
"""Classes that have a vocabulary."""
POINTER, MAX_POINTER_BYTES = b"version https://git-lfs", 1024
ONE_CHECKPOINT = "take both from the same checkpoint"


def check_weights(run: StartConfig) -> None:
    """Require every part of a local checkpoint to have its files, whole, and networks their own tensors."""
    path = run.config.actor_rollout_ref.model.path
    folder = Path(path).expanduser()
    if not folder.is_dir() or not (folder / INDEX).is_file():
        return
    for name, entry in sorted(read_object(folder / INDEX, KEY).items()):
        part = folder / name
        if not (isinstance(entry, list) and entry[0]) or not part.is_dir():
            continue  # those that are needed are reported by `check_model`
        _check_no_pointers(part)
        if READS_TEXT.search(entry[1]) and not any(file for form in VOCABULARIES for file in part.glob(form)):
            raise _lacks(f"the vocabulary of its {name}", part, f"has none of {', '.join(VOCABULARIES)}")
        if WEIGHTLESS.search(entry[1]) or (part / RANDOM_MARKER).exists():
            continue
        trains = name.startswith("transformer")
        _check_plain(part / "config.json", "weights that train" if trains else "encoders in plain weights")
        shapes = _shapes_in_files(part, *STEMS.get(entry[0], OF_DIFFUSERS))
        if shapes and entry[0] == "diffusers":
            _check_tensors(part / "config.json", shapes, trains=trains)


def _lacks(what: str, place: Path, found: str, remedy: str = "complete the download") -> ValueError:
    return ValueError(f"{KEY} must hold {what}, but {str(place)!r} {found}; {remedy}")


def _check_no_pointers(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.stat().st_size <= MAX_POINTER_BYTES and file.read_bytes().startswith(POINTER):
            raise _lacks("whole files", file, "is a pointer of Git LFS", "fetch it with `git lfs pull`")


def _check_plain(config: Path, what: str) -> None:
    """Require a class, and weights that are not quantised."""
    content = read_object(config, KEY)
    if {"_class_name", "model_type", "architectures"}.isdisjoint(content):
        raise _lacks("a class in each config.json", config, "names none")
    method = content.get("quantization_config")
    require(
        method is None,
        f"{KEY} must hold {what}, but {str(config)!r} has a quantization_config",
        method,
        "take the checkpoint that it was made of; digen.sampling.outside.fp8 and dtypes save memory",
    )


def _shapes_in_files(folder: Path, stem: str, stem_of_pickles: str) -> dict[str, tuple[int, ...]]:
    """Tensors of the safetensors in `folder` that its library reads; none where the weights are pickles."""
    files = _named(folder, stem, ".safetensors") or _named(folder, stem_of_pickles, ".bin")
    if not files:
        there = sorted(file.name for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".pt", ".pth"))
        what = f"{stem}.safetensors, or parts and the {stem}{INDEX_SUFFIX} that names them"
        raise _lacks(what, folder, f"has {', '.join(there[:3]) or 'no weights'}", "download it, or rename them")
    shapes: dict[str, tuple[int, ...]] = {}
    for file, tensors in files.items():
        of_file = shapes_of(file) if file.suffix == ".safetensors" else {} if _is_whole_pickle(file) else None
        if of_file is None:
            raise _lacks("whole weight files", file, f"was cut short: {file.stat().st_size} bytes", "download it again")
        if of_file and (lacking := sorted(tensors - of_file.keys())):
            raise _lacks("the tensors that its indices name", file, f"has no {lacking[0]}", ONE_CHECKPOINT)
        shapes |= of_file
    return shapes


def _named(folder: Path, stem: str, suffix: str) -> dict[Path, set[str]]:
    """Weight files with this stem -> names of tensors that an index says are in them."""
    index, whole = folder / f"{stem}{suffix}.index.json", folder / f"{stem}{suffix}"
    if not index.is_file():
        return {whole: set()} if whole.is_file() else {}
    listed, files = read_object(index, KEY).get("weight_map"), {}
    for tensor, name in (listed if isinstance(listed, dict) else {}).items():
        files.setdefault(folder / str(name), set()).add(tensor)
    if missing := sorted(file.name for file in files if not file.is_file()):
        raise _lacks(f"all weight files that {index.name} names", folder, f"lacks {', '.join(missing[:3])}")
    return files


def _is_whole_pickle(file: Path) -> bool:
    """True for a pickle of PyTorch: a zip, whose directory stands at its end, or one of the older form."""
    with open(file, "rb") as content:
        return content.read(1) == b"\x80" or is_zipfile(file)


def shapes_of(file: Path) -> dict[str, tuple[int, ...]] | None:
    """Tensors that the file's header names; None if the file is none, or not as long as the header says."""
    try:
        with safe_open(file, framework="numpy") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except SafetensorError:
        return None


def _check_tensors(config: Path, shapes: Mapping[str, tuple[int, ...]], *, trains: bool) -> None:
    """Require the weights of the network that `config` describes: diffusers would draw missing ones at random."""
    if not trains and any(".query." in name for name in shapes):
        return  # names of an older diffusers, which it renames
    expected = dict(_expected(config.parent, config.read_text(encoding="utf-8")))
    problems = {
        "has no weights for": {one for one in expected.keys() - shapes.keys() if trains or "num_batches" not in one},
        "has weights that the network lacks:": shapes.keys() - expected.keys() if trains else (),
        "has other shapes for": {one for one in expected.keys() & shapes.keys() if expected[one] != shapes[one]},
    }
    for problem, names in problems.items():
        if names:
            what = f"the weights of the network in its {config.parent.name}/config.json"
            raise _lacks(what, config.parent, f"{problem} {first_of(sorted(names), 3)}", ONE_CHECKPOINT)


@lru_cache(maxsize=4)
def _expected(folder: Path, text: str) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Tensors of the network with this configuration, by name."""
    rule = f"{KEY} must hold the configuration of a network"
    with refusing(rule, str(folder / "config.json"), "complete the download"):
        network = make_meta_network(folder, str(json.loads(text)["_class_name"]), torch.float32)
    return tuple((name, tuple(tensor.shape)) for name, tensor in network.state_dict().items())
