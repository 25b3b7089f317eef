# SPDX-License-Identifier: Apache-2.0
"""The package's tiny checkpoints, as tests ask for them."""

import shutil
import tempfile
from functools import cache
from pathlib import Path

from verl_digen.models import tiny
from verl_digen.models.tiny import BUILDERS

__all__ = ["BUILDERS", "build_tiny", "build_tiny_qwen_image"]


def build_tiny(name: str, path: str | Path, seed: int = 0) -> Path:
    """Write a tiny checkpoint as `verl_digen.models.tiny` does. A process builds each once and copies it, which takes
    2 ms of a core in place of 60."""
    return Path(shutil.copytree(_built(name, seed), path, dirs_exist_ok=True))


@cache
def _built(name: str, seed: int) -> Path:
    return tiny.build_tiny(name, Path(_folder().name) / f"{name}_{seed}", seed)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Folder of the checkpoints that are copied; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="tiny_")


def build_tiny_qwen_image(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen-Image checkpoint of 3 MB to `path`; the same weights for the same seed."""
    return build_tiny("qwen_image", path, seed)
