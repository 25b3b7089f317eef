# SPDX-License-Identifier: Apache-2.0
"""The second copy of the weights; on FSDP2 it is tested through the engine."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engine.harness import assert_equal
from verl_digen.engine.copies import ShadowWeights, local_shards
from verl_digen.engine.fsdp2 import recover


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


@pytest.mark.parametrize("reshards", [True, False])
def test_gives_back_after_a_forward_that_failed(module: nn.Module, one_rank: None, reshards: bool):
    """An exception leaves FSDP2 with gathered parameters, which are not the weights."""
    for unit in (module[1], module):
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshards)
    shadow = ShadowWeights(module)
    with torch.no_grad():
        module[0].weight.add_(1)
    trained = {name: shard.clone() for name, shard in local_shards(module).items()}
    inputs = torch.ones(1, 2)
    right = module(inputs)

    def fail(*unused: object) -> None:
        raise KeyError

    handle = module[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError), shadow.swapped_in(module):
        module(inputs)
    handle.remove()
    recover(module)  # as `abort` does
    assert_equal(local_shards(module), trained)
    assert torch.equal(module(inputs), right)
