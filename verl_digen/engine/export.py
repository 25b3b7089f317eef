# SPDX-License-Identifier: Apache-2.0
"""Sharded weights -> full tensors under the names the diffusers checkpoint uses, one at a time.

- Gathering a tensor is a collective: every rank must consume the whole iterator, in step.
- A rank that sends or writes may take minutes over some tensors. The others wait for it on the CPU, at most
  `LOOKAHEAD` tensors ahead: a gather that waits on the device is killed by NCCL's watchdog.
- A yielded tensor is a copy; it stays valid when the weights change.
- The module is not changed: LoRA is merged into the copy, in fp32, rounded once.

Invariants (tests/engine/test_export.py): names and shapes are the checkpoint's; before training, so are the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id

NamedTensors = Iterator[tuple[str, Tensor]]

Item = TypeVar("Item")

LOOKAHEAD = 16
"""Tensors that a rank may gather before the slowest rank asks for them."""

PEFT_PREFIX = "base_model.model."
"""Prefix that `PeftModel` puts before every name."""
BASE_LAYER = ".base_layer."
"""Part of the names of a wrapped layer's own weights."""
ADAPTER = "default"
"""peft's name for the only adapter."""


def export(
    module: nn.Module, dtype: torch.dtype | None, *, merge_lora: bool, base_sync_done: bool
) -> tuple[NamedTensors, dict[str, Any] | None]:
    """(tensors for a replica, peft config of an adapter that is not merged, else None).

    Args:
        merge_lora: True if replicas have the adapter merged into their weights.
        base_sync_done: read if the adapter is not merged. True: replicas have the base already, send the adapter alone.
    """
    if merge_lora or not isinstance(module, PeftModel):
        return full_weights(module, merge_lora=merge_lora, dtype=dtype), None
    if base_sync_done:
        return adapter_weights(module, dtype), adapter_config(module)
    return full_weights(module, merge_lora=False, dtype=dtype), adapter_config(module)


@torch.no_grad()
def full_weights(module: nn.Module, *, merge_lora: bool, dtype: torch.dtype | None = None) -> NamedTensors:
    """All weights of the transformer, without adapter tensors.

    Args:
        module: with or without peft's and FSDP2's wrapping.
        merge_lora: add the adapter's share; False yields the base weights as loaded.
        dtype: dtype of yielded floating tensors; None keeps each parameter's own.

    Raises:
        ValueError: the adapter cannot be merged.
    """
    adapters = mergeable(module) if merge_lora else {}
    for name, value in in_step(module.state_dict().items(), _meet):
        if is_adapter(name):
            continue
        full = _gather(value)
        if name in adapters:
            layer = adapters[name]
            down, up = (
                _gather(part.get_submodule(ADAPTER).get_parameter("weight")).float()
                for part in (layer.lora_A, layer.lora_B)
            )
            full = merge(full, layer, down, up).to(dtype or full.dtype)
        yield plain_name(name), _cast(full, dtype)


def merge(base: Tensor, layer: LoraLayer, down: Tensor, up: Tensor) -> Tensor:
    """Sum of a layer's base weight and its adapter's share, in fp32. `down`, `up`: the adapter's two matrices, fp32."""
    return base.float() + layer.scaling[ADAPTER] * (up @ down)


@torch.no_grad()
def adapter_weights(module: PeftModel, dtype: torch.dtype | None = None) -> NamedTensors:
    """The adapter's tensors under peft's canonical names, "base_model.model.LAYER.lora_A.weight"."""
    # save_embedding_layers: "auto" asks the Hugging Face hub about the base model
    state = get_peft_model_state_dict(module, state_dict=module.state_dict(), save_embedding_layers=False)
    for name, value in in_step(state.items(), _meet):
        yield name, _cast(_gather(value), dtype)


def in_step(items: Iterable[Item], meet: Callable[[], None]) -> Iterator[Item]:
    """Yield `items`, and call `meet`, which waits for the other ranks, before each further `LOOKAHEAD` of them."""
    for number, item in enumerate(items):
        if number and number % LOOKAHEAD == 0:
            meet()
        yield item


def _meet() -> None:
    """Wait for all ranks on the CPU: of the backends that verl gives the process group, a barrier takes gloo."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def adapter_config(module: nn.Module) -> dict[str, Any] | None:
    """The adapter's peft config as verl hands it to a rollout, or None without one."""
    return module.peft_config[ADAPTER].to_dict() if isinstance(module, PeftModel) else None


def plain_name(name: str) -> str:
    """A state-dict name of the wrapped module -> the checkpoint's."""
    return name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, ".")


def is_adapter(name: str) -> bool:
    """True for the state-dict name of an adapter's own tensor."""
    return any(part.startswith("lora_") for part in name.split("."))


def mergeable(module: nn.Module, asked: str = "actor_rollout_ref.model.lora.merge=true") -> dict[str, LoraLayer]:
    """State-dict name of each wrapped weight -> its layer.

    Args:
        asked: what the user typed to have it merged.

    Raises:
        ValueError: a layer that `merge` is not for.
    """
    layers = {}
    for name, layer in module.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        if not isinstance(layer.get_base_layer(), nn.Linear) or layer.lora_variant:
            raise ValueError(
                f"{asked} needs plain LoRA on linear layers, got {type(layer).__name__}"
                f"{' with DoRA' if layer.lora_variant else ''} around {plain_name(name)}; leave it out, or train "
                "without this in actor_rollout_ref.model.target_modules or the adapter"
            )
        layers[f"{name}{BASE_LAYER}weight"] = layer
    return layers


def _gather(value: Tensor) -> Tensor:
    """The full tensor, in its own memory, on the compute device."""
    if not isinstance(value, DTensor):
        return value.detach().clone()
    on_device = value.detach().to(get_device_id())
    assert isinstance(on_device, DTensor)
    full = on_device.full_tensor()
    # if one rank holds the whole tensor, this is its shard itself
    is_shard = full.untyped_storage().data_ptr() == on_device.to_local().untyped_storage().data_ptr()
    return full.clone() if is_shard else full


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
