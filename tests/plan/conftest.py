# SPDX-License-Identifier: Apache-2.0
"""Every architecture's tiny checkpoint, and plans of runs on the tiny Qwen-Image."""

from __future__ import annotations

import pytest

from tests.models.cases import CASES, Loaded
from tests.tiny_models import build_tiny


@pytest.fixture(scope="session", params=CASES, ids=[case.name for case in CASES])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every architecture's tiny checkpoint in turn; read only."""
    case = request.param
    return Loaded(case, build_tiny(case.name, tmp_path_factory.mktemp(case.name) / "checkpoint"))
