# SPDX-License-Identifier: Apache-2.0
"""A frozen base in int8 against a checkpoint that holds the weights which it stands for."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engine.harness import (
    LORA,
    assert_close,
    gradients,
    log_probs,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
)
from tests.engine.test_generating import SEED, Rank, drawn, server_of
from tests.grid import IN_GRID
from tests.rollout.test_server import make_requests
from tests.sampling.runs import assert_bitwise
from verl_digen.models.kernels import quantise, store_int8

INT8 = {**LORA, "int8_base": True}


def in_int8(weight: Tensor) -> Tensor:
    """A weight, rounded to 127 steps of its channel's largest number."""
    step = (weight.abs().amax(1, keepdim=True) / 127).bfloat16().float()
    return torch.where(step > 0, (weight / step).round().clamp(-127, 127) * step, 0.0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(24, 16)


class Network(nn.Module):
    _no_split_modules = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.block, self.outside = Block(), nn.Linear(16, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=IN_GRID)])
def test_a_layer_is_one_with_the_rounded_weight_to_the_bit(dtype, compiles):
    torch.manual_seed(0)
    network = Network()
    layer, kept = network.block.layer, network.outside.weight
    with torch.no_grad():
        layer.weight[3] = 0.0
    given, bias = layer.weight.detach().clone(), layer.bias.detach().to(dtype)
    store_int8(network)
    assert network.outside.weight is kept and network.state_dict().keys() == {
        *("block.layer.bias", "outside.weight", "outside.bias")
    }
    layer.bias = nn.Parameter(bias, requires_grad=False)
    run = torch.compile(layer) if compiles else layer
    rows = [torch.randn(2, 3, 24, dtype=dtype).requires_grad_() for _ in range(2)]
    rows[1].data.copy_(rows[0].data)
    found, expected = run(rows[0]), F.linear(rows[1], in_int8(given).to(dtype), bias)
    weight = torch.randn_like(found)
    found.backward(weight)
    expected.backward(weight)
    assert rows[0].grad is not None and rows[1].grad is not None
    if compiles:
        assert torch.allclose(found, expected, rtol=0, atol=0.02) and torch.allclose(
            rows[0].grad, rows[1].grad, atol=0.02
        )
    else:
        assert torch.equal(found, expected) and torch.equal(rows[0].grad, rows[1].grad)
    assert (in_int8(given) - given).abs().max() <= given.abs().max() / 127


@pytest.fixture
def rounded(tiny_qwen_image, tmp_path) -> Path:
    """The checkpoint with the rounded weights."""
    path = tmp_path / "rounded"
    shutil.copytree(tiny_qwen_image, path)
    (file,) = (path / "transformer").glob("*.safetensors")
    tensors = load_file(file)
    for name, value in tensors.items():
        if name.startswith("transformer_blocks.") and name.endswith(".weight") and value.dim() == 2:
            tensors[name] = in_int8(value.float()).to(value.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return path


def perturbed(path: Path, model: dict[str, Any]) -> Any:
    engine = make_engine(path, digen={"seed": SEED}, model=model)
    perturb(engine)
    return engine


def test_it_trains_and_generates_as_the_rounded_weights_do(one_rank, tiny_qwen_image, rounded):
    engine, other, batch = perturbed(tiny_qwen_image, INT8), perturbed(rounded, LORA), make_batch(rounded)
    assert sum(value.numel() for value in engine.module.buffers() if value.dtype == torch.int8) > 10_000
    assert_close(gradients(engine, batch)[0], gradients(other, batch)[0], 1e-5)
    for found, expected in zip(log_probs(engine, batch), log_probs(other, batch), strict=True):
        assert torch.allclose(found, expected, rtol=1e-5)
    samples = (asyncio.run(drawn(server_of(Rank(each)), make_requests()[:4])) for each in (engine, other))
    for found, expected in zip(*samples, strict=True):
        assert_bitwise(found.trajectory, expected.trajectory)


def shared(path: Path, folder: Path) -> dict[str, Tensor]:
    return gradients(perturbed(path, INT8), make_batch(path))[0]


@pytest.mark.slow
def test_ranks_share_it(one_rank, tiny_qwen_image, tmp_path):
    expected = shared(tiny_qwen_image, tmp_path)
    assert_close(on_two_ranks([shared], tiny_qwen_image, tmp_path)["shared"], expected, 1e-5)


def test_a_network_without_values_gets_int8_of_the_same_shapes():
    real, meta = nn.Linear(24, 16), nn.Linear(24, 16, device="meta")
    for layer in (real, meta):
        quantise(layer)
    assert [value.is_meta for value in meta.buffers()] == [True, True]
    for mine, given in zip(real.buffers(), meta.buffers(), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (given.shape, given.stride(), given.dtype)
