# SPDX-License-Identifier: Apache-2.0
"""Copies of the weights by policy: when they follow, what is kept and saved, and one in place of the weights."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.engine.harness import assert_equal
from verl_digen.algorithms.ema import Decay, ema_decay
from verl_digen.config import EmaConfig
from verl_digen.engine.copies import PolicyCopies, ShadowWeights, local_shards
from verl_digen.engine.fsdp2 import recover


def make_copies(
    module: nn.Module, ema: EmaConfig | None = None, decays: dict[str, Decay] | None = None
) -> PolicyCopies:
    return PolicyCopies(module, ema or EmaConfig(), decays or {})


def number(copies: PolicyCopies, policy: str) -> float:
    return copies[policy].shards["weight"].item()


@pytest.fixture
def module() -> nn.Module:
    made = nn.Linear(1, 1, bias=False)
    nn.init.constant_(made.weight, 1.0)
    return made


def move(module: nn.Module, value: float) -> None:
    with torch.no_grad():
        module.get_parameter("weight").fill_(value)


def test_a_policy_follows_batches_and_the_average_steps(module: nn.Module):
    copies = make_copies(module, EmaConfig(enable=True, every_steps=2, max_decay=0.9), {"old": Decay(0.25, 0.5)})
    move(module, 3.0)
    copies.follow_step(0)
    assert (number(copies, "average"), number(copies, "old")) == (1.0, 1.0)
    copies.follow_step(1)
    copies.follow_batch(2)
    average = ema_decay(1, 0.9) * 1.0 + (1 - ema_decay(1, 0.9)) * 3.0
    assert number(copies, "average") == pytest.approx(average)
    assert number(copies, "old") == pytest.approx(0.5 * 1.0 + 0.5 * 3.0)


def test_a_batch_without_a_step_that_changed_the_weights_leaves_the_policy(module: nn.Module):
    copies = make_copies(module, decays={"old": Decay(0.0, 0.0)})
    move(module, 3.0)
    copies.follow_batch(0)
    assert number(copies, "old") == 1.0
    copies.follow_batch(1)
    assert number(copies, "old") == 3.0
    move(module, 5.0)
    copies.follow_batch(1)
    assert number(copies, "old") == 3.0


def test_a_reference_that_is_renewed_is_a_copy_of_every_nth_step_and_is_saved(module: nn.Module):
    copies, found = make_copies(module, decays={"reference": Decay(0.0, 0.0, every=3)}), []
    for k in range(1, 7):
        move(module, 10.0 * k)
        copies.follow_batch(k)
        found.append(number(copies, "reference"))
    assert found == [1.0, 1.0, 30.0, 30.0, 30.0, 60.0]
    assert {*copies.state_dict()} == {"reference"}


def test_a_copy_that_is_kept_can_be_dropped_and_one_that_follows_stays(module: nn.Module):
    copies = make_copies(module, decays={"old": Decay(0.0, 0.0)})
    copies.keep("reference")
    assert {*copies} == {"old", "reference"}
    copies.drop("old"), copies.drop("reference"), copies.drop("never kept")
    assert {*copies} == {"old"}


def test_copies_that_follow_are_saved_and_a_missing_one_starts_from_the_weights(
    module: nn.Module, caplog: pytest.LogCaptureFixture
):
    copies = make_copies(module, decays={"old": Decay(0.0, 0.0)})
    copies.keep("reference")
    saved = copies.state_dict()
    assert {*saved} == {"old"}
    other = make_copies(module, EmaConfig(enable=True), {"old": Decay(0.0, 0.0)})
    move(module, 9.0)
    other.resume(saved, num_updates=4)
    assert (number(other, "old"), number(other, "average")) == (1.0, 9.0)
    assert "no copy of policy average" in caplog.text
    other.follow_batch(4)
    assert number(other, "old") == 1.0, "these steps were followed before the checkpoint"


@pytest.fixture
def layers() -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    layers[1].bias.requires_grad_(False)
    return layers


def test_holds_the_trainable_weights_alone(layers: nn.Module):
    assert set(ShadowWeights(layers).shards) == {"0.weight", "0.bias", "1.weight"}


def test_swapped_in_shows_the_copy_and_gives_back(layers: nn.Module):
    shadow = ShadowWeights(layers)
    with torch.no_grad():
        layers[0].weight.mul_(3)
    trained = layers[0].weight.clone()
    with shadow.swapped_in(layers):
        torch.testing.assert_close(layers[0].weight, trained / 3)
    assert torch.equal(layers[0].weight, trained)


@pytest.mark.parametrize("reshards", [True, False])
def test_gives_back_after_a_forward_that_failed(layers: nn.Module, one_rank: None, reshards: bool):
    """An exception leaves FSDP2 with gathered parameters, which are not the weights."""
    for unit in (layers[1], layers):
        fully_shard(unit, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshards)
    shadow = ShadowWeights(layers)
    with torch.no_grad():
        layers[0].weight.add_(1)
    trained = {name: shard.clone() for name, shard in local_shards(layers).items()}
    inputs = torch.ones(1, 2)
    right = layers(inputs)

    def fail(*unused: object) -> None:
        raise KeyError

    handle = layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError), shadow.swapped_in(layers):
        layers(inputs)
    handle.remove()
    recover(layers)  # as `abort` does
    assert_equal(local_shards(layers), trained)
    assert torch.equal(layers(inputs), right)
