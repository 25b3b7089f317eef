# SPDX-License-Identifier: Apache-2.0
"""Networks of a published size whose weights are drawn where they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_models import build_tiny
from verl_digen.models import load_model
from verl_digen.models.random_weights import MARKER, NUM_DRAWN, STD, draw


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    """A checkpoint whose transformer has a config and no weights."""
    folder = tmp_path / "drawn"
    build_tiny("sd3", folder)
    for file in (folder / "transformer").glob("*.safetensors"):
        file.unlink()
    (folder / "transformer" / MARKER).touch()
    return folder


def test_every_process_draws_the_same_network_without_a_file_of_weights(drawn: Path):
    one, other = (load_model(drawn).load_transformer(torch.bfloat16) for _ in range(2))
    assert not any(tensor.is_meta for tensor in (*one.parameters(), *one.buffers()))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert {parameter.dtype for parameter in one.parameters()} == {torch.bfloat16}
    values = dict(one.named_parameters())
    assert values["norm_out.linear.bias"].eq(0).all() and values["transformer_blocks.0.attn.to_q.bias"].eq(0).all()
    weight = values["transformer_blocks.0.attn.to_q.weight"].float()
    assert abs(weight.std().item() / STD - 1) < 0.1 and abs(weight.mean().item()) < STD / 5


def test_tensors_of_one_shape_differ_and_one_longer_than_what_is_drawn_repeats_it():
    shape = torch.Size((8, 16))
    assert not torch.equal(draw("a.weight", shape, torch.float32), draw("b.weight", shape, torch.float32))
    long = draw("a.weight", torch.Size((NUM_DRAWN + 5, 1)), torch.float32).flatten()
    assert torch.equal(long[:5], long[NUM_DRAWN:]) and not torch.equal(long[:5], long[5:10])
    assert draw("norm.weight", torch.Size((4,)), torch.float32).eq(1).all()
