# SPDX-License-Identifier: Apache-2.0
"""The package's tiny checkpoints, as tests ask for them."""

from pathlib import Path

from verl_digen.models.tiny import BUILDERS, build_tiny

__all__ = ["BUILDERS", "build_tiny", "build_tiny_qwen_image"]


def build_tiny_qwen_image(path: str | Path, seed: int = 0) -> Path:
    """Write a Qwen-Image checkpoint of 3 MB to `path`; the same weights for the same seed."""
    return build_tiny("qwen_image", path, seed)
