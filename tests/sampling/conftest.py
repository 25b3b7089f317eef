# SPDX-License-Identifier: Apache-2.0
"""The tiny Qwen-Image that samplers run."""

from pathlib import Path

import pytest
import torch
from torch import nn

from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.types import Condition


@pytest.fixture(scope="module")
def model(tiny_qwen_image: Path) -> DiffusionModel:
    return load_model(tiny_qwen_image)


@pytest.fixture(scope="module")
def network(model: DiffusionModel) -> nn.Module:
    return model.load_transformer(torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def condition(model: DiffusionModel) -> Condition:
    (found,) = model.load_encoder(torch.float32, torch.device("cpu"))([PromptInputs("a red circle")])
    return found
