# SPDX-License-Identifier: Apache-2.0
"""Every architecture's tiny checkpoint, and plans of runs on the tiny Qwen-Image."""

import pytest

from tests.grid import IN_GRID
from tests.models.cases import CASES, Loaded

IN_CI = ("flux_dev", "ltx2", "qwen_image", "sd3", "wan2.1")
"""Architectures that CI plans."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(case, marks=() if case.name in IN_CI else IN_GRID) for case in CASES],
    ids=[case.name for case in CASES],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every architecture's tiny checkpoint in turn; read only."""
    name = request.param.name
    return Loaded.tiny(name, tmp_path_factory.mktemp(name) / "checkpoint")
