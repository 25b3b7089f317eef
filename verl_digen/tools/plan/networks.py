# SPDX-License-Identifier: Apache-2.0
"""Parameter counts of a checkpoint's networks, from its config files on the meta device.

Invariant (tests/plan/test_reality.py): bytes equal a real engine's, for a full fine-tune and with an adapter.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import kept_in_fp32, networks_of


@dataclass(frozen=True)
class Counts:
    """Parameters of one network; bytes in their own dtypes."""

    num_params: int
    num_trained: int
    param_bytes: int
    trained_bytes: int
    buffer_bytes: int
    """Bytes of buffers (tables), which are not sharded."""
    exported_buffers: int
    """Elements of buffers that checkpoints and weight updates hold."""
    outside_blocks: int
    num_int8: int
    """Weights in int8 (`int8_base`), which are buffers and none of the parameters."""

    @property
    def num_weights(self) -> int:
        """Parameters, and weights in int8."""
        return self.num_params + self.num_int8


@dataclass(frozen=True)
class Tensors:
    """Parameters of one size."""

    num_bytes: int
    is_trained: bool
    num: int


def list_tensors(network: nn.Module) -> tuple[Tensors, ...]:
    """Parameters of a network by size; on any device."""
    found = Counter((value.nbytes, value.requires_grad) for value in network.parameters())
    return tuple(Tensors(size, trained, num) for (size, trained), num in sorted(found.items()))


def count_network(network: nn.Module) -> Counts:
    """Count a transformer as the engine trains it, adapter included; on any device."""
    parameters = list(network.parameters())
    trained = [value for value in parameters if value.requires_grad]
    buffers = dict(network.named_buffers())
    exported = network.state_dict()
    blocks = [sum(value.numel() for value in block.parameters()) for block in blocks_of(network)]
    total = sum(value.numel() for value in parameters)
    return Counts(
        num_params=total,
        num_trained=sum(value.numel() for value in trained),
        param_bytes=sum(value.nbytes for value in parameters),
        trained_bytes=sum(value.nbytes for value in trained),
        buffer_bytes=sum(value.nbytes for value in buffers.values()),
        exported_buffers=sum(value.numel() for name, value in buffers.items() if name in exported),
        outside_blocks=total - sum(blocks),
        num_int8=sum(value.numel() for value in buffers.values() if value.dtype == torch.int8),
    )


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that FSDP2 shards one by one, and gradient checkpointing recomputes one by one."""
    names = {name for one in networks_of(network) for name in one._no_split_modules}
    return [module for module in network.modules() if type(module).__name__ in names]


ENCODERS = ("text_encoder", "image_encoder")
"""Beginnings of the folders of encoders."""


@dataclass(frozen=True)
class Part:
    """Parameters of an encoder or of the VAE that a replica keeps."""

    num_params: int
    num_bytes: int
    """Bytes in the dtypes in which a replica loads them."""


def count_parts(model: DiffusionModel, dtype: torch.dtype, *, as_loaded_by_us: bool) -> dict[str, Part]:
    """Folder of each encoder and of the VAE of a replica in `dtype` -> its parameters; "vae (images)" is the part of
    the VAE that encodes a prompt's images, of which a replica has a copy.

    The VAE decodes in a dtype of its own (`DiffusionModel.decoder_dtype`), and transformers keeps some parameters of
    text encoders in fp32. `as_loaded_by_us` leaves out the parameters that our model file frees after loading;
    vLLM-Omni keeps all.
    """
    parts = {}
    others = {"vae", *model.spec.encoder_parts, *model.spec.audio_parts}
    for name, entry in model.index.items():
        if isinstance(entry, list) and (name in others or name.startswith(ENCODERS)) and entry[1] is not None:
            network = _make_part(model.path / name, entry[0], entry[1])
            freed = model.spec.freed.get(name, ()) if as_loaded_by_us else ()
            kept = {key: value for key, value in network.named_parameters() if not key.startswith(freed)}
            asked = model.part_dtype(name, dtype)
            parts[name] = Part(
                sum(value.numel() for value in kept.values()),
                sum(value.numel() * _loaded_dtype(network, key, asked).itemsize for key, value in kept.items()),
            )
            if name == "vae" and model.spec.encodes_images:
                kept = {key: value for key, value in kept.items() if key.startswith(model.spec.encodes_images)}
                num_params = sum(value.numel() for value in kept.values())
                parts["vae (images)"] = Part(num_params, num_params * asked.itemsize)
    return parts


def _make_part(folder: Path, library: str, class_name: str) -> nn.Module:
    with torch.device("meta"):  # not accelerate's init_empty_weights, under which tied weights would count twice
        if library != "transformers":  # diffusers, or the module of a pipeline with networks of its own
            owner = diffusers if library == "diffusers" else getattr(diffusers.pipelines, library)
            network_class: Any = getattr(owner, class_name)
            return network_class.from_config(network_class.load_config(folder))
        network_class = getattr(transformers, class_name)
        return network_class(network_class.config_class.from_pretrained(folder))


def _loaded_dtype(network: Any, name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype in which `from_pretrained(dtype=dtype)` of transformers leaves the parameter `name`; diffusers' VAEs have
    all in `dtype`."""
    if not isinstance(network, transformers.PreTrainedModel):
        return dtype
    in_fp32 = set(network._keep_in_fp32_modules_strict or ()) if dtype in (torch.float16, torch.bfloat16) else set()
    if dtype == torch.float16:
        in_fp32 |= set(network._keep_in_fp32_modules or ())
    return dtype if in_fp32.isdisjoint(name.split(".")) else torch.float32


def transformer_bytes(model: DiffusionModel, network: nn.Module, dtype: torch.dtype, *, in_one_dtype: bool) -> int:
    """Bytes of all experts' parameters and exported tables in a replica of `dtype`. `network`: what
    `model.load_transformer` gives, in any dtype and on any device; `in_one_dtype`: False where parameters that
    diffusers keeps in fp32 stay so."""
    buffers, exported = dict(network.named_buffers()), network.state_dict()
    tables = sum(value.numel() for name, value in buffers.items() if name in exported) * dtype.itemsize
    fp32 = torch.float32.itemsize
    return tables + sum(
        value.numel() * (dtype.itemsize if in_one_dtype or not kept_in_fp32(name, model.spec.transformer) else fp32)
        for name, value in network.named_parameters()
    )
