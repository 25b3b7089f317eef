# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.tiny_models import build_tiny, build_tiny_qwen_image
from verl_digen.algorithms.objectives import registry

torch.set_num_threads(1)

# Ray's workers are nice (15) by default: beside other tests on the same cores they would get about 1 % of them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name is Ray's


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files with the mark `slow` to the front: a long one that starts last has one core to itself."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def own_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget objectives that a test registers."""
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen-Image checkpoint with random weights; read only."""
    return build_tiny_qwen_image(tmp_path_factory.mktemp("tiny_qwen_image"))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Wan2.1 checkpoint with random weights; read only."""
    return build_tiny("wan2.1", tmp_path_factory.mktemp("tiny_wan") / "checkpoint")
