# SPDX-License-Identifier: Apache-2.0
"""Parameter counts of a checkpoint's networks, from its config files on the meta device.

Invariant (tests/plan/test_reality.py): bytes equal those of a real engine, for a full fine-tune and with an adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verl_digen.models.base import DiffusionModel


@dataclass(frozen=True)
class Counts:
    """Parameters of one network."""

    num_params: int
    """All parameters."""
    num_trained: int
    """Trained parameters."""
    param_bytes: int
    """Bytes of all parameters, in their own dtypes."""
    trained_bytes: int
    """Bytes of the trained parameters."""
    buffer_bytes: int
    """Bytes of buffers (tables), which are not sharded."""
    exported_buffers: int
    """Elements of buffers that checkpoints and weight updates hold."""
    largest_block: int
    """Parameters of the largest block; a block is sharded, gathered and freed as one."""
    outside_blocks: int
    """Parameters outside all blocks."""


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
        largest_block=max(blocks),
        outside_blocks=total - sum(blocks),
    )


def blocks_of(network: nn.Module) -> list[nn.Module]:
    """The blocks that FSDP2 shards one by one, and gradient checkpointing recomputes one by one."""
    names = set(_base(network)._no_split_modules)
    return [module for module in network.modules() if type(module).__name__ in names]


def _base(network: Any) -> Any:
    """Unwrap peft's model."""
    return network.get_base_model() if hasattr(network, "get_base_model") else network


def count_parts(model: DiffusionModel, *, as_loaded_by_us: bool) -> dict[str, int]:
    """Folder of each text encoder and of the VAE -> number of parameters that a replica keeps.

    Args:
        as_loaded_by_us: leave out the parameters that our model file frees after loading; vLLM-Omni keeps all.
    """
    counts = {}
    for name, entry in model.index.items():
        if isinstance(entry, list) and (name == "vae" or name.startswith("text_encoder")) and entry[1] is not None:
            freed = model.spec.freed.get(name, ()) if as_loaded_by_us else ()
            counts[name] = _count_part(model.path / name, entry[0], entry[1], freed)
    return counts


def _count_part(folder: Path, library: str, class_name: str, freed: tuple[str, ...]) -> int:
    import diffusers
    import transformers

    with torch.device("meta"):  # not accelerate's init_empty_weights, under which tied weights would count twice
        if library == "diffusers":
            network_class: Any = getattr(diffusers, class_name)
            network = network_class.from_config(network_class.load_config(folder))
        else:
            network_class = getattr(transformers, class_name)
            network = network_class(network_class.config_class.from_pretrained(folder))
    return sum(value.numel() for name, value in network.named_parameters() if not name.startswith(freed))
