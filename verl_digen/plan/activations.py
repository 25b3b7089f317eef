# SPDX-License-Identifier: Apache-2.0
"""Activation memory of a row between forward and backward, from a trace of the real network at the real size.

- The forward runs on fake tensors, which have shapes and no memory, so a 14 B network takes seconds. The
  network's own code decides what autograd saves; weights are not counted.
- Without gradient checkpointing a row keeps all saved tensors. With it, the inputs of every block, the tensors that
  the largest block saves while it is recomputed, and the tensors saved outside of blocks:

      plain = sum over blocks(saved) + outside          checkpointed = sum over blocks(inputs) + max(saved) + outside

- Attention is assumed fused: it saves its inputs, its output and one number per query and head.

Invariant (tests/plan/test_activations.py): on a tiny network, real tensors save the same bytes as fake ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from verl_digen.models.base import DiffusionModel
from verl_digen.plan.networks import blocks_of
from verl_digen.types import Condition, Geometry

MID_SIGMA = 0.5
"""Sigma of the traced row; nothing depends on it."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one row, guidance's second branch included."""

    saved: int
    """Saved by all blocks."""
    largest_block: int
    """Saved by the block that saves most."""
    inputs: int
    """Inputs of all blocks together."""
    outside: int
    """Saved outside all blocks."""
    largest: int
    """Largest saved tensor."""

    def kept(self, *, recomputes: bool) -> int:
        """Bytes that a row keeps, see the module docstring."""
        return self.outside + (self.inputs + self.largest_block if recomputes else self.saved)


def trace_activations(
    model: DiffusionModel,
    network: nn.Module,
    geometry: Geometry,
    condition: Condition,
    *,
    is_guided: bool,
    dtype: torch.dtype,
) -> Activations:
    """Trace one row through `network`, whose parameters become fake.

    Args:
        network: ONE network (no `Experts`), parameters on the meta device in their training dtypes, adapter included.
        condition: real zeros of the prompt's shapes.
        dtype: compute dtype of the network.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    num_rows = 2 if is_guided else 1
    collated = model.collate([condition] * num_rows)
    if model.default_embedded_guidance is not None:
        collated["guidance"] = torch.full((num_rows,), model.default_embedded_guidance)
    latents = torch.empty(num_rows, *model.latent_shape(geometry), device="meta")
    tracer = _Tracer(network)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), tracer.watching():
        _make_fake(network, dtype)
        model.compute_dtype = dtype
        velocity = model.predict(
            network,
            torch.empty_like(latents, device="cpu"),
            torch.full((num_rows,), MID_SIGMA),
            {name: _fake(mode, value) for name, value in collated.items()},
            geometry,
        )
        assert velocity.requires_grad
    return tracer.result()


def _make_fake(network: nn.Module, dtype: torch.dtype) -> None:
    """Give every parameter and buffer a fake CPU tensor, in the dtype the network computes in, as FSDP2 gathers it."""
    for module in network.modules():
        for name, value in list(module._parameters.items()):
            if value is not None:
                fake = torch.empty(value.shape, dtype=dtype, device="cpu")
                module._parameters[name] = nn.Parameter(fake, requires_grad=value.requires_grad)
        for name, value in list(module._buffers.items()):
            if value is not None:
                module._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cpu")


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    if isinstance(value, Tensor):
        return mode.from_tensor(value)
    return [mode.from_tensor(entry) for entry in value]


class _Tracer:
    """Count the bytes that autograd saves, per running block; each storage once."""

    def __init__(self, network: nn.Module):
        self._network = network
        self._blocks = blocks_of(network)
        self._current: int | None = None
        self._saved: dict[int | None, dict[int, int]] = {None: {}}
        self._inputs: dict[int, int] = {}
        self._kept: list[Tensor] = []
        """Keeps tensors alive, so that no storage address is reused."""
        self._weights: set[int] = set()

    def watching(self) -> Any:
        from contextlib import ExitStack

        stack = ExitStack()
        for number, block in enumerate(self._blocks):
            stack.callback(block.register_forward_pre_hook(self._enter(number), with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(self._leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved))
        return stack

    def _enter(self, number: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._current = number
            self._saved[number] = {}
            for value in (*args, *kwargs.values()):
                if isinstance(value, Tensor):
                    self._note(self._inputs, value)

        return hook

    def _leave(self, *unused: Any) -> None:
        self._current = None

    def _save(self, tensor: Tensor) -> Tensor:
        if not self._weights:
            self._weights = {_storage(value) for value in self._network.parameters()}
        if _storage(tensor) not in self._weights:
            self._note(self._saved[self._current], tensor)
        return tensor

    def _note(self, counted: dict[int, int], tensor: Tensor) -> None:
        counted[_storage(tensor)] = tensor.untyped_storage().nbytes()
        self._kept.append(tensor)

    def result(self) -> Activations:
        """The counts; call it after the forward."""
        blocks = [self._saved[number] for number in sorted(key for key in self._saved if key is not None)]
        inside = {storage: size for block in blocks for storage, size in block.items()}
        outside = {storage: size for storage, size in self._saved[None].items() if storage not in inside}
        return Activations(
            saved=sum(inside.values()),
            largest_block=max(sum(block.values()) for block in blocks),
            inputs=sum(self._inputs.values()),
            outside=sum(outside.values()),
            largest=max([*inside.values(), *outside.values()]),
        )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
