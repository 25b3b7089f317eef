# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest
import torch

from tests.models.cases import CASES, CPU, Loaded, draw_image
from tests.tiny_models import build_tiny
from verl_digen.inputs.images import SourceImage
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel


@pytest.fixture(scope="session", params=CASES, ids=[case.name for case in CASES])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """Every architecture's tiny checkpoint in turn; read only."""
    name = request.param.name
    return Loaded.tiny(name, tmp_path_factory.mktemp(name) / "checkpoint")


# -- a model of edits: NAME, PIPELINE and IMAGES of the test's module ------------------------------------------------
@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DiffusionModel:
    name = request.module.NAME
    return load_model(build_tiny(name, tmp_path_factory.mktemp(name) / "c"))


@pytest.fixture(scope="module")
def network(model: DiffusionModel) -> torch.nn.Module:
    return model.load_transformer(torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def encode(model: DiffusionModel) -> Any:
    return model.load_encoder(torch.float32, CPU)


@pytest.fixture(scope="module")
def pipeline(request: pytest.FixtureRequest, model: DiffusionModel) -> Any:
    loaded = request.module.PIPELINE.from_pretrained(model.path, dtype=torch.float32, **model.pipeline_parts())
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def images(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceImage, ...]:
    folder = tmp_path_factory.mktemp("images")
    return tuple(
        draw_image(folder / f"{number}.png", size, number) for number, size in enumerate(request.module.IMAGES)
    )
