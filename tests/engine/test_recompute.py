# SPDX-License-Identifier: Apache-2.0
"""Activation offload: the same gradient, and no input of a block stays where it was computed."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verl.workers.engine.fsdp import transformer_impl

from tests.engine.harness import LORA, assert_equal, digen_section, gradients, make_batch, make_engine
from verl_digen.engine.recompute import Recomputation, recompute_from_host
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.checkpoint import Experts
from verl_digen.platforms import device_memory

RECOMPUTES = {"recompute_blocks": "all"}
OFFLOADS = RECOMPUTES | {"enable_activation_offload": True}


class Counting(nn.Module):
    """Adds `shift`, which has no gradient, and counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = 0

    def forward(self, hidden: Tensor, shift: Tensor, unused: None) -> Tensor:
        self.count += 1
        return self.linear(hidden).tanh() + shift


def run(blocks: list[Counting], hidden: Tensor, *, offloads: bool) -> tuple[Tensor, list[weakref.ref[Any]]]:
    """(output, the inputs of all blocks but the first)"""
    inputs = []
    for block in blocks:
        function = recompute_from_host if offloads else torch.utils.checkpoint.checkpoint
        given = {} if offloads else {"use_reentrant": False}
        hidden = function(block, hidden, torch.ones(4), None, **given)
        inputs.append(weakref.ref(hidden.untyped_storage()))
    return hidden.sum(), inputs[:-1]


@pytest.mark.parametrize("offloads", [True, False])
def test_no_input_of_a_block_stays_and_it_runs_twice(offloads: bool):
    torch.manual_seed(0)
    blocks = [Counting() for _ in range(3)]
    hidden = torch.randn(2, 4, requires_grad=True)
    loss, inputs = run(blocks, hidden, offloads=offloads)
    gc.collect()
    assert all((reference() is None) == offloads for reference in inputs)
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for block in blocks for parameter in block.parameters()]
    loss.backward()  # as for rows without an advantage scale and with KL
    assert all(
        torch.equal(parameter.grad, 2 * gradient)
        for parameter, gradient in zip((p for block in blocks for p in block.parameters()), once, strict=True)
    )
    assert {block.count for block in blocks} == {3}
    assert hidden.grad is not None


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_gradients_are_equal_with_and_without_offload(
    monkeypatch: pytest.MonkeyPatch, tiny_qwen_image: Path, model: dict[str, Any]
):
    monkeypatch.delattr(transformer_impl, "enable_activation_offloading")  # verl's own would raise NameError
    batch = make_batch(tiny_qwen_image, true_cfg_scale=4.0)
    digen = {"sampling": {"true_cfg_scale": 4.0}}
    found = []
    for options in (RECOMPUTES, OFFLOADS):
        engine = make_engine(tiny_qwen_image, model=model | options, digen=digen)
        assert engine.model_config.enable_activation_offload == (options is OFFLOADS)
        found.append(gradients(engine, batch)[0])
    assert_equal(*found)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (OFFLOADS | {"recompute_blocks": "none"}, "enable_activation_offload must be false where no .*got True; set a"),
        (OFFLOADS | {"recompute_blocks": 0}, "enable_activation_offload must be false where no .*got True; set act"),
        (RECOMPUTES | {"enable_gradient_checkpointing": False}, "recompute_blocks must be auto or none with enable_gr"),
    ],
)
def test_options_that_contradict_are_refused(tiny_qwen_image: Path, options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        DiffusionModelConfig(path=str(tiny_qwen_image), digen=digen_section(), **options)


def test_verls_key_switches_recomputation_off(tiny_qwen_image: Path):
    config = DiffusionModelConfig(path=str(tiny_qwen_image), digen=digen_section(), enable_gradient_checkpointing=False)
    assert config.recomputed == "none"


class Network(nn.Module):
    """Two blocks as diffusers' networks run them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Counting(), Counting()])

    def enable_gradient_checkpointing(self, function: Any) -> None:
        self._run = function

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = self._run(block, hidden, torch.ones(4), None)
        return hidden

    @property
    def counts(self) -> list[int]:
        return [block.count for block in self.blocks]


def test_the_first_blocks_are_recomputed_of_each_expert(monkeypatch: pytest.MonkeyPatch):
    experts = Experts.__new__(Experts)
    nn.Module.__init__(experts)
    experts.names = ("high", "low")
    networks = {name: Network() for name in experts.names}
    for name, network in networks.items():
        experts.add_module(name, network)
    recomputation = Recomputation(experts, 1, offloads=False)
    assert recomputation.share == 0
    for name in reversed(experts.names):
        networks[name](torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert networks[name].counts == [2, 1] and recomputation.share == 0.5


@pytest.mark.parametrize("trains", [True, False])
def test_a_recomputed_block_is_measured_while_it_runs_again(monkeypatch: pytest.MonkeyPatch, trains: bool):
    """A device on which each forward of block k leaves 10 + k bytes; all of them stay. The first block counts as one
    also where it is frozen and runs once: block numbers are those of a forward."""
    network, allocated = Network(), [0]
    network.blocks[0].requires_grad_(trains)
    recomputation = Recomputation(network, "all", offloads=False)
    monkeypatch.setattr(device_memory, "allocated_bytes", lambda: allocated[0])
    for number, block in enumerate(network.blocks):

        def allocate(*unused: Any, size: int = 10 + number) -> None:
            allocated[0] += size

        block.register_forward_pre_hook(allocate)
    with recomputation.measured() as sizes:
        network(torch.ones(2, 4, requires_grad=trains)).sum().backward()
    assert sizes == {0: 10, 1: 11}
    sizes.clear()
    network(torch.ones(2, 4, requires_grad=trains)).sum().backward()
    assert sizes == {}, "later forwards ask for no memory"
