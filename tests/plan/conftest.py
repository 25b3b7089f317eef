# SPDX-License-Identifier: Apache-2.0
"""Every architecture's tiny checkpoint, and plans of runs on the tiny Qwen-Image."""

import pytest

from tests.grid import IN_GRID
from tests.models.cases import CASES, Loaded

VARIANTS = (
    "flux_kontext",
    "flux_schnell",
    "hunyuan_video15_i2v",
    "qwen_image_edit",
    "qwen_image_edit_plus",
    "wan2.1_i2v",
    "wan2.2_i2v_a14b",
    "wan2.2_ti2v_5b",
    "wan2.2_ti2v_5b_i2v",
)
"""Architectures whose network is that of another one, with other inputs or sizes; planned in the grid."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(case, marks=IN_GRID if case.name in VARIANTS else ()) for case in CASES],
    ids=[case.name for case in CASES],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every architecture's tiny checkpoint in turn; read only."""
    name = request.param.name
    return Loaded.tiny(name, tmp_path_factory.mktemp(name) / "checkpoint")
