# SPDX-License-Identifier: Apache-2.0
"""Planned bytes of a replica's networks against those that a replica loads, of every architecture."""

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import pytest
import torch
from torch import nn

from tests.models.cases import PROMPTS, Loaded
from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.checkpoint import in_one_dtype
from verl_digen.models.published import checkpoint_folder
from verl_digen.sampling.fp8 import Fp8Layers
from verl_digen.sampling.requests import rows_per_group, sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.tools.plan.networks import count_parts, transformer_bytes
from verl_digen.tools.plan.run import empty_condition, record_bytes
from verl_digen.types import PromptRow

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
        assert Fp8Layers(meta).num_bytes == sum(weight.nbytes for weight, _ in copies._copies) < num_bytes([network])


@pytest.mark.parametrize(
    ("repository", "itemsize"), [("black-forest-labs/FLUX.1-dev", 4), ("Qwen/Qwen-Image", 2)], ids=["fp32", "bf16"]
)
def test_a_published_vae_is_counted_as_it_decodes(repository: str, itemsize: int) -> None:
    with checkpoint_folder(repository) as folder:
        vae = count_parts(load_model(folder), torch.bfloat16, as_loaded_by_us=True)["vae"]
    assert vae.num_bytes == itemsize * vae.num_params


def test_shapes_are_those_of_the_models_own_encoder(loaded):
    geometry = loaded.case.sizes[0]
    for encoded in loaded.encode(PROMPTS):
        of_text = len(encoded["embeds"]) - loaded.model.num_image_text_tokens(geometry)
        assert of_text < 30 or loaded.model.spec.condition.num_tokens is not None
        planned = empty_condition(loaded.model, of_text, geometry)
        assert {name: value.shape for name, value in planned.items()} == {
            name: value.shape for name, value in encoded.items()
        }


# -- bytes and rows of a planned sample against a real one's record ------------------------------------------
SAMPLING = SamplingConfig(height_px=32, width_px=32, num_steps=6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "digen",
    [
        DigenConfig(sampling=SAMPLING),
        DigenConfig(sampling=SAMPLING, window=WindowConfig(kind="fraction", fraction=0.4)),
        DigenConfig(loss={"name": "diffusion_nft"}, sampling=SAMPLING, forward=ForwardConfig(num_points=4)),
    ],
    ids=["all", "fraction", "forward"],
)
def test_a_record_is_as_large_as_a_real_one(tiny_qwen_image, digen, dtype):
    model = load_model(tiny_qwen_image)
    network = model.load_transformer(torch.float32)
    conditions = model.load_encoder(torch.float32, torch.device("cpu"))([PromptInputs("a cat")])
    for uid in ("p0", "p1", "p2"):
        asked = sample_request(digen, PromptRow("a cat", "test", None, uid=uid), 0, step=0, validate=False)
        asked = replace(asked, sampling=replace(asked.sampling, true_cfg_scale=1.0))
        sampler = Sampler(model, network, run_seed=0, device=torch.device("cpu"), latents_dtype=dtype)
        (made,), _ = sampler.sample([asked], conditions, None, version=0)
        latent_bytes = prod(model.latent_shape(asked.sampling.geometry)) * dtype.itemsize
        assert record_bytes(asked, latent_bytes) == sum(column.nbytes for column in made.record.columns().values())
        assert rows_per_group(digen, 1) == len(made.record.sigmas)
