# SPDX-License-Identifier: Apache-2.0
"""The network of a `diffusers` replica, from its checkpoint to its device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import in_one_dtype
from verl_digen.models.kernels import compute_exactly, set_kernels, store_int8
from verl_digen.sampling.fp8 import Fp8Layers, require_fp8
from verl_digen.weights.receiver import WeightReceiver
from verl_digen.weights.sending import own_device


@dataclass(frozen=True)
class LoadedNetwork:
    """A network on its device."""

    model: DiffusionModel
    dtype: torch.dtype
    device: torch.device
    weights: WeightReceiver
    """Holds the network in peft's wrapper, if there is an adapter."""
    fp8: Fp8Layers
    """Copies of the network's layers, made at their first use."""


class Checkpoint(NamedTuple):
    """A checkpoint of which nothing is loaded yet, and where it will compute."""

    model: DiffusionModel
    dtype: torch.dtype
    device: torch.device


def open_checkpoint(config: Any, model_config: Any, num_threads: int) -> Checkpoint:
    """Set this process up to generate with a checkpoint, by verl's rollout config and a `DiffusionModelConfig`.
    `num_threads`: CPU threads; 0 leaves torch's default."""
    if num_threads:
        torch.set_num_threads(num_threads)
    dtype = PrecisionType.to_dtype(config.dtype)
    compute_exactly(dtype)
    return Checkpoint(load_model(model_config.local_path), dtype, own_device())


def load_network(checkpoint: Checkpoint, model_config: Any) -> LoadedNetwork:
    """Load the network of a replica, by its `DiffusionModelConfig`. ValueError for `digen.sampling.outside.fp8` on a
    device, or with a network, without fp8."""
    from verl_digen.models.fused_layers import fuse_adapter  # diffusers, which the driver does without

    model, dtype, device = checkpoint
    digen = model_config.digen
    transformer = model.load_transformer(dtype)
    if model_config.lora_rank == 0:  # as in the trainer, see `verl_digen.engine.build`
        in_one_dtype(transformer, dtype)
    if model_config.int8_base:
        store_int8(transformer)
    transformer = transformer.to(device)
    set_kernels(
        model, transformer, side="replica", attention=digen.rollout_attention_backend, compiles=digen.rollout_compiles
    )
    fp8 = Fp8Layers(transformer)
    if digen.sampling.outside.fp8:
        require_fp8(fp8, device)
    weights = WeightReceiver(transformer, model_config.adapter_config())
    fuse_adapter(weights.module)
    return LoadedNetwork(*checkpoint, weights, fp8)
