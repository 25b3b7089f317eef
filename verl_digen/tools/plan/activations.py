# SPDX-License-Identifier: Apache-2.0
"""Activation memory of a row between forward and backward, from a trace of the real network at the real size.

The forward runs on fake tensors, so the network's own code decides what autograd saves. A block is what diffusers' code
gives to its checkpointing function; the first one of each kind runs, and the others save and return what it did.

Backward frees memory from the last block to the first, so each block's turn is a moment of its own:

    tail                  head + inputs of the recomputed blocks + kept by the others + tail
    block i, kept         head + inputs of the recomputed blocks + kept by the others before i + its peak
    block i, recomputed   head + inputs of the blocks up to i + its peak

A block's peak is the most of its saved tensors together with the gradients of its activations, tracked in one more
forward and backward of a block of each kind. Attention is assumed fused: it saves its inputs, its output and one number
per query and head. So are PyTorch's RMS norms, as on a GPU: they save their input and one number per row.

Invariant (tests/plan/test_activations.py): on a tiny network, real tensors save the same bytes as fake ones.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import get_gradient_edge
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import networks_of
from verl_digen.tools.plan.networks import blocks_of
from verl_digen.tools.plan.peak import PeakBytes, give_fake_weights
from verl_digen.types import Condition, Geometry

MID_SIGMA = 0.5
"""Sigma of the traced row; nothing depends on it."""


@dataclass(frozen=True)
class BlockBytes:
    """Bytes of one row in one block, guidance's second branch included."""

    inputs: int
    """Inputs that no other block has, as recomputation keeps them."""
    saved_inputs: int
    """Part of `inputs` that autograd saves."""
    saved: int
    """Saved by autograd, without inputs."""
    peaks: tuple[tuple[int, int], ...]
    """(bytes without inputs, bytes of weight gradients, which do not grow with the rows) at the moments of its backward
    that may be the fullest; first the most of the former."""
    num_params: int
    """Parameters that are gathered for it."""
    num_trained: int
    """Parameters that get a gradient."""

    @property
    def kept(self) -> int:
        """Bytes between forward and backward without recomputation."""
        return self.saved_inputs + self.saved


@dataclass(frozen=True)
class Moment:
    """Memory at a moment of backward."""

    block: int
    """Number of the block that runs; the number of blocks: the tail."""
    row_bytes: int
    gradient_bytes: int
    """Bytes of the block's weight gradients."""


@dataclass(frozen=True)
class Activations:
    """Bytes of one row, guidance's second branch included."""

    blocks: tuple[BlockBytes, ...]
    """Order: that in which they run."""
    head: int
    """Saved before and between the blocks, and inputs of several blocks."""
    tail: int
    """Saved behind the blocks."""

    @property
    def largest_block(self) -> int:
        """Bytes of the block that keeps most."""
        return max(block.kept for block in self.blocks)

    def moments(self, num_recomputed: int, *, offloads: bool = False) -> list[Moment]:
        """The moments of backward that may be the fullest, see the module. `offloads`: a recomputed block's inputs are
        on the device during its own turn only."""
        found, held = [], self.head
        for number, block in enumerate(self.blocks):
            is_recomputed = number < num_recomputed
            inputs = block.inputs if is_recomputed else block.saved_inputs
            found += [Moment(number, held + inputs + size, gradients) for size, gradients in block.peaks]
            held += (0 if offloads else block.inputs) if is_recomputed else block.kept
        return [*found, Moment(len(self.blocks), held + self.tail, 0)]

    def row_bytes(self, num_recomputed: int) -> int:
        """Most bytes of a row, see the module."""
        return max(moment.row_bytes for moment in self.moments(num_recomputed))


def trace_activations(
    model: DiffusionModel,
    network: nn.Module,
    geometry: Geometry,
    condition: Condition,
    *,
    is_guided: bool,
    dtype: torch.dtype,
    has_backward: bool = True,
) -> Activations:
    """Trace one row through `network`, whose parameters become fake.

    Args:
        network: ONE network (no `Experts`), parameters on the meta device in their training dtypes, adapter included.
        condition: real zeros of the prompt's shapes.
        has_backward: False leaves out the moments of backward (`BlockBytes.peaks`).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    tracer = _Tracer(network, dtype)
    with mode, torch.enable_grad(), sdpa_kernel(SDPBackend.FLASH_ATTENTION), fused_norms():
        with tracer.watching():
            model.compute_dtype = dtype
            velocity = run_rows(mode, model, network, geometry, condition, num_rows=2 if is_guided else 1)
            assert velocity.requires_grad
            del velocity
        return tracer.result(has_backward=has_backward)


def fused_norms() -> AbstractContextManager[Any]:
    """Context in which RMS norms allocate and save what a GPU's do, in place of a chain of operations: what layer norms
    do everywhere, whose two numbers per row in bf16 take the room of one in fp32."""
    return patch.object(torch, "rms_norm", lambda rows, shape, weight, eps: F.layer_norm(rows, shape, weight))


def run_rows(
    mode: FakeTensorMode,
    model: DiffusionModel,
    network: nn.Module,
    geometry: Geometry,
    condition: Condition,
    *,
    num_rows: int,
) -> Tensor:
    """One forward of `num_rows` rows on fake tensors -> velocity. Call it under `mode`; `condition` is real zeros."""
    with unset_fake_temporarily():  # masks are made of real lengths
        collated = model.collate([{**condition} for _ in range(num_rows)])  # rows of one prompt may take less
        if model.default_embedded_guidance is not None:
            collated["guidance"] = torch.full((num_rows,), model.default_embedded_guidance)
    return model.predict(
        network,
        torch.empty(num_rows, *model.latent_shape(geometry)),
        torch.full((num_rows,), MID_SIGMA),
        tree_map(mode.from_tensor, collated),
        geometry,
    )


Sizes = dict[int, int]
"""Storage -> bytes."""
_numbers = count(1)
"""Below 0, storages that blocks which do not run would save."""


class _Tracer:
    """Count the bytes that autograd saves, per running block; each storage once."""

    def __init__(self, network: Any, dtype: torch.dtype):
        self._network, self._dtype = network, dtype
        self._waiting = {block: list(block.modules()) for block in blocks_of(network)}
        """Blocks without weights; the first ones of each kind get theirs when they run."""
        self._calls: list[tuple[nn.Module, tuple[Any, ...], Sizes]] = []
        """Blocks with their arguments and what they saved, as they ran."""
        self._outside: dict[int, Sizes] = {}
        """Number of blocks that ran before -> saved."""
        self._saved: Sizes = {}
        """Record for the next saved tensor."""
        self._alive: list[Tensor] = []
        """Keeps tensors alive, so that no storage address is reused."""
        self._weights: set[int] = set()
        self._known: dict[tuple[Any, ...], _Replay] = {}
        """Kind of block -> what the first one did."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which the forward runs."""
        (base,) = networks_of(self._network)
        base.enable_gradient_checkpointing(self._run)
        inside = {module for modules in self._waiting.values() for module in modules}
        self._give(module for module in self._network.modules() if module not in inside)
        for block in self._waiting:
            block.register_forward_pre_hook(self._give_block)
        self._leave()
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved):
            yield
        base.disable_gradient_checkpointing()

    def _give(self, modules: Iterable[nn.Module]) -> None:
        """Weights in the dtype that the network computes in, as FSDP2 gathers it."""
        modules = list(modules)
        give_fake_weights(modules, self._dtype)
        own = (value for module in modules for value in module.parameters(recurse=False))
        self._weights.update(map(_storage, own))

    def _give_block(self, block: nn.Module, args: Any = ()) -> None:
        self._give(self._waiting.pop(block, ()))

    def _run(self, block: nn.Module, *args: Any) -> Any:
        kind = _kind(block, args)
        if kind in self._known:
            saved, result = self._known[kind].run(args)
        else:
            inside = (saved for _, _, saved in self._calls)
            others = {storage for saved in [*self._outside.values(), *inside] for storage in saved}
            self._saved = saved = {}
            result = block(*args)
            self._known[kind] = _Replay(args, saved, others, result)
        self._calls.append((block, args, saved))
        self._leave()
        return result

    def _leave(self) -> None:
        self._saved = self._outside[len(self._calls)] = {}

    def _save(self, tensor: Tensor) -> Tensor:
        if _storage(tensor) not in self._weights:
            self._saved[_storage(tensor)] = tensor.untyped_storage().nbytes()
            self._alive.append(tensor)
        return tensor

    def result(self, *, has_backward: bool) -> Activations:
        """The counts; call it after the forward, under the fake mode."""
        inputs = [_sizes(args) for _, args, _ in self._calls]
        uses = Counter(storage for own in inputs for storage in own)
        shared = {storage: size for own in inputs for storage, size in own.items() if uses[storage] > 1}
        tail = self._outside.pop(len(self._calls))
        head = shared | {storage: size for saved in self._outside.values() for storage, size in saved.items()}
        saved_by_blocks = {storage for _, _, saved in self._calls for storage in saved}
        blocks = []
        peaks: dict[tuple[type, int], tuple[tuple[int, int], ...]] = {}
        for number in reversed(range(len(self._calls))):  # a frozen network's first block gets nothing to differentiate
            block, args, saved = self._calls[number]
            own = {storage: size for storage, size in saved.items() if storage not in inputs[number] | head}
            kind = type(block), sum(saved.values())
            if has_backward and kind not in peaks:
                self._give_block(block)
                peaks[kind] = _peaks_of_block(block, args)
            alone = {storage: size for storage, size in inputs[number].items() if storage not in head}
            blocks.append(
                BlockBytes(
                    inputs=sum(alone.values()),
                    saved_inputs=sum(size for storage, size in alone.items() if storage in saved),
                    saved=sum(own.values()),
                    peaks=max(peaks.get(kind, ()), ((sum(own.values()), 0),)),
                    num_params=sum(value.numel() for value in block.parameters()),
                    num_trained=sum(value.numel() for value in block.parameters() if value.requires_grad),
                )
            )
        return Activations(
            blocks=tuple(reversed(blocks)),
            head=sum(head.values()),
            tail=sum(size for storage, size in tail.items() if storage not in head.keys() | saved_by_blocks),
        )


def _kind(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Key of blocks that save and return the same tensors."""
    leaves = tree_leaves(args)
    tensors = [value for value in leaves if isinstance(value, Tensor)]
    stored = [_storage(value) for value in tensors]
    return (
        type(block),
        *((name, value.shape, value.requires_grad) for name, value in block.named_parameters()),
        *((name, value) for name, value in vars(block).items() if isinstance(value, bool | str)),
        *((value.shape, value.stride(), value.dtype, value.requires_grad) for value in tensors),
        *(stored.index(storage) for storage in stored),
        *(repr(value) for value in leaves if not isinstance(value, Tensor)),
    )


class _Replay:
    """Tensors that the first block of a kind saved and returned, for the next one, whose own take their places."""

    def __init__(self, args: tuple[Any, ...], saved: Sizes, others: set[int], result: Any):
        """Record a block. `others`: storages that were saved before it ran."""
        self._args, self._saved, self._others, self._result = list(_sizes(args)), saved, others, result
        self._alive: list[Any] = []

    def run(self, args: tuple[Any, ...]) -> tuple[Sizes, Any]:
        """Tensors that a block with these arguments saves, and those that it returns."""
        own = {_storage(value): value for value in tree_leaves(args) if isinstance(value, Tensor)}
        tensors = dict(zip(self._args, (own[storage] for storage in _sizes(args)), strict=True))
        self._alive.append(tensors)

        def again(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if _storage(value) not in tensors:
                empty = torch.empty(value.untyped_storage().nbytes() // value.itemsize, dtype=value.dtype)
                tensors[_storage(value)] = empty.requires_grad_().clone() if value.requires_grad else empty
            return tensors[_storage(value)].as_strided(value.shape, value.stride(), value.storage_offset())

        result = tree_map(again, self._result)
        places = {storage: _storage(value) for storage, value in tensors.items()}
        inner = self._saved.keys() - places.keys() - self._others
        places |= {storage: -next(_numbers) for storage in inner}  # which no other block has: a number will do
        return {places.get(storage, storage): size for storage, size in self._saved.items()}, result


def _sizes(values: Any) -> Sizes:
    """The storages of the tensors among these values."""
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return {_storage(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}


def _peaks_of_block(block: nn.Module, args: tuple[Any, ...]) -> tuple[tuple[int, int], ...]:
    """`BlockBytes.peaks` of one more forward and backward. Its outputs are not held: a recomputed block makes none, and
    a kept one's are the inputs of the next."""
    starts: list[Tensor] = []

    def anew(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad:
            return value
        starts.append(value.detach().requires_grad_())
        return starts[-1]

    args = tree_map(anew, args)
    if not starts:  # nothing before the block trains
        return ((0, 0),)
    there = [value for value in tree_leaves(args) if isinstance(value, Tensor)]
    trained = [parameter for parameter in block.parameters() if parameter.requires_grad]
    with PeakBytes([*there, *block.parameters(), *block.buffers()]) as allocated:
        made = [value for value in tree_leaves(block(*args)) if isinstance(value, Tensor) and value.requires_grad]
        ends, shapes = [get_gradient_edge(value) for value in made], [torch.empty_like(value) for value in made]
        del made
        gradients = torch.autograd.grad(ends, [*starts, *trained], shapes, allow_unused=True)[len(starts) :]
        return allocated.peaks(gradient for gradient in gradients if gradient is not None)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
