# SPDX-License-Identifier: Apache-2.0
"""Sharded weights -> full tensors under the names the diffusers checkpoint uses, one at a time.

Gathering is a collective: every rank must consume the whole iterator, in step. A rank that sends or writes may take
minutes over some tensors. The others wait for it on the CPU, at most `LOOKAHEAD` collectives ahead: a gather that waits
on the device is killed by NCCL's watchdog. A yielded tensor is a copy, which stays valid when the weights change. LoRA
is merged into it in fp32, rounded once.

Invariants (tests/engine/test_export.py): names and shapes are the checkpoint's; before training, so are the values.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from verl.utils.device import get_device_id

NamedTensors = Iterator[tuple[str, Tensor]]

Item = TypeVar("Item")

LOOKAHEAD = 16
"""Collectives that a rank may begin before the slowest rank does."""
GATHER_BYTES = 32 << 20
"""Maximum bytes of several tensors that one collective gathers. Each costs half a millisecond of CPU time, whatever its
size, and an adapter has a thousand tensors."""

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

    With `base_sync_done` replicas have the base already, and an adapter that is not merged is sent alone.
    """
    if merge_lora or not isinstance(module, PeftModel):
        return full_weights(module, merge_lora=merge_lora, dtype=dtype), None
    config = module.peft_config[ADAPTER].to_dict()
    if base_sync_done:
        return adapter_weights(module, dtype), config
    return full_weights(module, merge_lora=False, dtype=dtype), config


@torch.no_grad()
def full_weights(module: nn.Module, *, merge_lora: bool, dtype: torch.dtype | None = None) -> NamedTensors:
    """All weights of the transformer, without adapter tensors and under the checkpoint's names.

    Floating tensors have `dtype`; None keeps each parameter's own. `merge_lora` adds the adapter's share, with a
    ValueError if it cannot be merged; False yields the base weights as loaded.
    """
    adapters = mergeable(module) if merge_lora else {}
    for name, full in gathered((name, value) for name, value in module.state_dict().items() if not is_adapter(name)):
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
    for name, full in gathered(state.items()):
        yield name, _cast(full, dtype)


def gathered(items: Iterable[tuple[str, Tensor]]) -> NamedTensors:
    """The full tensors, each in its own memory, on the compute device; on every rank."""
    for run in in_step(together(items), _meet):
        yield from zip([name for name, _ in run], _gather_all([value for _, value in run]), strict=True)


def together(items: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """Split into runs of tensors that one collective gathers."""
    run: list[tuple[str, Tensor]] = []
    layout, num_bytes = None, 0
    for name, value in items:
        own = _layout(value)
        if run and (own is None or own != layout or num_bytes + value.nbytes > GATHER_BYTES):
            yield run
            run, num_bytes = [], 0
        run.append((name, value))
        layout, num_bytes = own, num_bytes + value.nbytes
    if run:
        yield run


def _layout(value: Tensor) -> tuple[DeviceMesh, torch.dtype] | None:
    """Equal for tensors that may be gathered together: cut evenly along their first dimension; None for any other."""
    if not isinstance(value, DTensor) or value.placements != (Shard(0),):
        return None
    mesh = value.device_mesh
    return (mesh, value.dtype) if mesh.size() > 1 and value.shape[0] % mesh.size() == 0 else None


def _gather_all(values: Sequence[Tensor]) -> list[Tensor]:
    """The full tensors of a run of `together`."""
    if len(values) == 1:
        return [_gather(values[0])]
    shards = [
        value.to_local().detach().to(get_device_id()).reshape(-1) for value in values if isinstance(value, DTensor)
    ]
    own = torch.cat(shards)
    mesh = cast("DTensor", values[0]).device_mesh
    of_ranks = own.new_empty(mesh.size(), len(own))
    dist.all_gather_into_tensor(of_ranks.view(-1), own, group=mesh.get_group())
    parts = of_ranks.split([len(shard) for shard in shards], dim=1)
    return [
        part.clone(memory_format=torch.contiguous_format).view(value.shape)
        for part, value in zip(parts, values, strict=True)
    ]


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


def plain_name(name: str) -> str:
    """A state-dict name of the wrapped module -> the checkpoint's."""
    return name.removeprefix(PEFT_PREFIX).replace(BASE_LAYER, ".")


def is_adapter(name: str) -> bool:
    """True for the state-dict name of an adapter's own tensor."""
    return any(part.startswith("lora_") for part in name.split("."))


def mergeable(module: nn.Module, asked: str = "actor_rollout_ref.model.lora.merge=true") -> dict[str, LoraLayer]:
    """State-dict name of each wrapped weight -> its layer. ValueError for a layer that `merge` is not for, with what
    the user typed to have it merged, `asked`."""
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
        return value.detach().to(get_device_id(), copy=True)
    on_device = value.detach().to(get_device_id())
    assert isinstance(on_device, DTensor)
    full = on_device.full_tensor()
    # if one rank holds the whole tensor, this is its shard itself
    is_shard = full.untyped_storage().data_ptr() == on_device.to_local().untyped_storage().data_ptr()
    return full.clone() if is_shard else full


def _cast(value: Tensor, dtype: torch.dtype | None) -> Tensor:
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value
