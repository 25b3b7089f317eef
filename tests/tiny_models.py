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
    """`verl_digen.models.tiny.build_tiny`; a process builds each checkpoint once and copies it, which is ten times
    as fast."""
    return Path(shutil.copytree(_built(name, seed), path, dirs_exist_ok=True))


@cache
def _built(name: str, seed: int) -> Path:
    return tiny.build_tiny(name, Path(_folder().name) / f"{name}_{seed}", seed)


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where the checkpoints are that are copied; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="tiny_")


def build_tiny_qwen_image(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen-Image checkpoint of 3 MB to `path`; the same weights for the same seed."""
    return build_tiny("qwen_image", path, seed)
