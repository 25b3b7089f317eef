# SPDX-License-Identifier: Apache-2.0
"""The second copy of the weights; on FSDP2 it is tested through the engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from verl_digen.engine.shadow import ShadowWeights


@pytest.fixture
def module() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    module[1].bias.requires_grad_(False)
    return module


def test_holds_the_trainable_weights_alone(module: nn.Module):
    assert set(ShadowWeights(module).shards) == {"0.weight", "0.bias", "1.weight"}


def test_swapped_in_shows_the_copy_and_gives_back(module: nn.Module):
    shadow = ShadowWeights(module)
    with torch.no_grad():
        module[0].weight.mul_(3)
    trained = module[0].weight.clone()
    with shadow.swapped_in(module):
        torch.testing.assert_close(module[0].weight, trained / 3)
    assert torch.equal(module[0].weight, trained)


def test_gives_back_after_an_error(module: nn.Module):
    shadow = ShadowWeights(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    trained = module[0].weight.clone()
    with pytest.raises(KeyError), shadow.swapped_in(module):
        raise KeyError
    assert torch.equal(module[0].weight, trained)


def test_state_of_other_parameters_is_refused(module: nn.Module):
    with pytest.raises(RuntimeError, match="resume with the same LoRA settings"):
        ShadowWeights(module).load_state_dict({"0.weight": torch.zeros(3, 2)})
