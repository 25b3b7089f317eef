# SPDX-License-Identifier: Apache-2.0
"""Planned bytes of a replica's networks against those that a replica loads, of every architecture."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from tests.models.cases import Loaded
from verl_digen.models import load_model
from verl_digen.models.checkpoint import in_one_dtype
from verl_digen.models.published import checkpoint_folder
from verl_digen.plan.networks import count_parts, transformer_bytes
from verl_digen.sampling.fp8 import Fp8Layers

CPU = torch.device("cpu")


def num_bytes(modules: Iterable[nn.Module]) -> int:
    return sum(value.nbytes for module in modules for value in module.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_replicas_networks_take_what_is_planned(loaded: Loaded, dtype: torch.dtype) -> None:
    """VAEs that decode in fp32, and parameters of encoders and networks that stay in fp32, are counted so."""
    model = load_model(loaded.path)
    parts = count_parts(model, dtype, as_loaded_by_us=True)
    assert num_bytes(model.load_decoder(dtype, CPU).modules) == parts.pop("vae").num_bytes
    of_audio = sum(parts.pop(name).num_bytes for name in model.spec.audio_parts)
    assert num_bytes(model.load_audio_decoder(dtype, CPU).modules) == of_audio
    assert num_bytes(model.load_encoder(dtype, CPU).modules) == sum(part.num_bytes for part in parts.values())
    network = model.load_transformer(dtype)
    exported = network.state_dict().keys() & dict(network.named_buffers()).keys()
    tables = sum(network.get_buffer(name).numel() for name in exported) * dtype.itemsize
    meta = model.load_transformer(torch.float32, meta=True)
    for in_one in (False, True):  # as under an adapter, and where all weights train
        network = in_one_dtype(network, dtype) if in_one else network
        assert transformer_bytes(model, meta, dtype, in_one_dtype=in_one) == num_bytes([network]) + tables
    copies = Fp8Layers(network)
    with copies.active():
        assert Fp8Layers(meta).num_bytes == copies.num_held_bytes < num_bytes([network])


@pytest.mark.parametrize(
    ("repository", "itemsize"), [("black-forest-labs/FLUX.1-dev", 4), ("Qwen/Qwen-Image", 2)], ids=["fp32", "bf16"]
)
def test_a_published_vae_is_counted_as_it_decodes(repository: str, itemsize: int) -> None:
    with checkpoint_folder(repository) as folder:
        vae = count_parts(load_model(folder), torch.bfloat16, as_loaded_by_us=True)["vae"]
    assert vae.num_bytes == itemsize * vae.num_params
