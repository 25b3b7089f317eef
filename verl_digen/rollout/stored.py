# SPDX-License-Identifier: Apache-2.0
"""Conditions of prompts in a folder, encoded before a run loads its transformer: `digen.rollout.encoders=before`.

    FOLDER/IDENTITY/ab/abcd....safetensors     IDENTITY: hash of the encoders' files, their dtype and libraries
                                               abcd...: `content_key` of the prompt

Runs with the same encoders share what they have encoded; a file is whole or absent, so a run that was killed goes on
where it ended. The folder is bounded (`conditions_gb`): the least recently used files are removed first, files of the
run never. A condition is bitwise the encoder's.
"""

import json
import os
import socket
from collections.abc import Collection, Iterator
from hashlib import sha256
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from verl_digen.inputs.images import PromptInputs, content_key
from verl_digen.models.base import DiffusionModel
from verl_digen.models.text import PromptEncoder
from verl_digen.require import require
from verl_digen.types import Condition

KEY = "digen.rollout.encoders"
NOT_ENCODERS = ("transformer", "scheduler")
"""Beginnings of the folders of a checkpoint that no encoder reads."""
READ_WHOLE, NUM_BLOCKS, BLOCK = 4 << 20, 64, 64 << 10
"""Bytes up to which a file is hashed whole; of larger ones NUM_BLOCKS evenly spread blocks of BLOCK bytes are."""


class StoredConditions:
    """The folder of one model's encoders below `digen.rollout.conditions_dir`; they compute in `dtype`."""

    def __init__(self, folder: str, model: DiffusionModel, dtype: torch.dtype):
        self.root = Path(folder).expanduser()
        self.folder = self.root / _identity(model, dtype)

    def path(self, prompt: PromptInputs) -> Path:
        """File of a prompt's condition, whether it exists or not."""
        key = content_key([prompt])
        return self.folder / key[:2] / f"{key}.safetensors"

    def write(self, prompt: PromptInputs, condition: Condition) -> int:
        """Write a condition -> its bytes."""
        path = self.path(prompt)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{socket.gethostname()}-{os.getpid()}")
        save_file({name: tensor.cpu().contiguous() for name, tensor in condition.items()}, partial)
        partial.replace(path)
        return path.stat().st_size

    def encoder(self) -> PromptEncoder:
        """An encoder that reads stored conditions."""
        return PromptEncoder(lambda prompts: [self._read(prompt) for prompt in prompts], ())

    def _read(self, prompt: PromptInputs) -> Condition:
        if not (path := self.path(prompt)).is_file():
            raise ValueError(
                f"a prompt must be known before the run with {KEY}=before, but {prompt.text[:60]!r} is not in "
                f"{str(self.folder)!r}; use {KEY}=host for prompts that are made during a run, and a "
                "digen.rollout.conditions_dir that all nodes share"
            )
        return load_file(path)

    def make_room(self, used: Collection[Path], coming: float, limit_bytes: float) -> int:
        """Remove files until there is room for `coming` bytes -> bytes of the folder, of all encoders. Files of the
        run, `used`, stay, whether they exist or not. ValueError if they take more than `limit_bytes`."""
        files = sorted((stat.st_mtime, stat.st_size, path) for path, stat in _files(self.root))
        total = sum(size for _, size, _ in files)
        for _, size, path in files:
            if total + coming > limit_bytes and path not in used:
                path.unlink(missing_ok=True)
                total -= size
        require(
            total + coming <= limit_bytes,
            f"digen.rollout.conditions_gb must hold the conditions of all {len(used)} prompts of the run, about "
            f"{(total + coming) / 1e9:.3g} GB",
            limit_bytes / 1e9,
            f"raise it, or keep the encoders in host memory: {KEY}=host",
        )
        return total


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Files that runs have written, parts that a kill has left among them; none that others keep in the folder."""
    for path in root.glob(f"{'[0-9a-f]' * 32}/{'[0-9a-f]' * 2}/*"):
        try:
            yield path, path.stat()
        except FileNotFoundError:  # another run removed it
            continue


def _identity(model: DiffusionModel, dtype: torch.dtype) -> str:
    """Hash of what a condition depends on besides its prompt."""
    import diffusers

    libraries = [torch.__version__, transformers.__version__, diffusers.__version__]
    found = sha256(json.dumps([model.spec.title, str(dtype), libraries]).encode())
    for name in sorted(model.index):
        if not name.startswith((*NOT_ENCODERS, "_")):
            for path in sorted(path for path in (model.path / name).rglob("*") if path.is_file()):
                found.update(str(path.relative_to(model.path)).encode())
                found.update(_digest(path))
    return found.hexdigest()[:32]


def _digest(path: Path) -> bytes:
    """Hash of a file's size and content; of a large one of parts of it."""
    size = path.stat().st_size
    found = sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= READ_WHOLE:
            found.update(file.read())
        for number in range(NUM_BLOCKS if size > READ_WHOLE else 0):
            file.seek((size - BLOCK) * number // (NUM_BLOCKS - 1))
            found.update(file.read(BLOCK))
    return found.digest()
