# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders of tests share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import build_tiny, build_tiny_qwen_image

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen-Image checkpoint with random weights; read only."""
    return build_tiny_qwen_image(tmp_path_factory.mktemp("tiny_qwen_image"))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Wan2.1 checkpoint with random weights; read only."""
    return build_tiny("wan2.1", tmp_path_factory.mktemp("tiny_wan") / "checkpoint")
