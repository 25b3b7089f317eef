# SPDX-License-Identifier: Apache-2.0
"""Recomputation of blocks in backward (activation checkpointing), by as many blocks as memory asks for.

- A recomputed block keeps its inputs alone between forward and backward. The first `num_blocks` blocks of a forward are
  recomputed: backward frees memory from the last block to the first, so that by the time they run again there is room.
- With `enable_activation_offload` the inputs of recomputed blocks wait in host memory. Those that require a gradient
  differ from block to block; a copy in pinned memory takes their place. Others (rotary tables, masks) are one tensor
  for all blocks and stay. Copies are made on the stream that computes, whose order of work is enough: the host waits
  for none.
- verl's own activation offload wraps each block and disables recomputation by the method of transformers' models, which
  diffusers' models lack; blocks would be recomputed twice.

Invariants (tests/engine/test_recompute.py, test_engine.py): the gradient is that without recomputation, and bitwise the
same with and without offload; no input of an offloading block stays on the device between forward and backward.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from verl.utils.device import get_device_name

from verl_digen.models.checkpoint import networks_of
from verl_digen.platforms import device_memory

ALL = sys.maxsize
"""Number of blocks that is more than any network has."""
HOST = "cpu"
"""Device of inputs that wait in host memory."""


class Recomputation:
    """Switch between recomputed blocks and blocks that keep their activations, from forward to forward. Experts count
    their blocks each. Networks of diffusers give each block and its inputs to a function; it decides here.

    `wanted` is "auto", "all", "none", or the number of blocks; `offloads` keeps the inputs of recomputed blocks in host
    memory.
    """

    def __init__(self, module: nn.Module, wanted: str | int, *, offloads: bool):
        if wanted == "auto" and get_device_name() == "cpu":
            wanted = "none"  # memory does not limit a tile there
        self.fixed: int | None = None if wanted == "auto" else {"all": ALL, "none": 0}.get(str(wanted), wanted)  # type: ignore[assignment]
        """Blocks to recompute, if memory does not decide."""
        self.num_blocks = ALL if self.fixed is None else self.fixed
        """Blocks that the next forward recomputes, the first ones."""
        self.offloads = offloads
        """True if inputs of recomputed blocks wait in host memory."""
        self._num_known = 0
        """Blocks of the network that ran last."""
        self._checkpoint = recompute_from_host if offloads else partial(checkpoint, use_reentrant=False)
        self._sizes: dict[int, int] | None = None
        if self.fixed != 0:
            for network in networks_of(module):
                network.enable_gradient_checkpointing(partial(self._run, {}))

    @property
    def share(self) -> float:
        """Share of the blocks of the last forward that backward recomputes; 0.0 before the first one."""
        return min(self.num_blocks, self._num_known) / max(self._num_known, 1)

    @contextmanager
    def measured(self) -> Iterator[dict[int, int]]:
        """Context in which one forward and backward is measured -> number of a recomputed block -> bytes of device
        memory that its second forward leaves allocated for its backward; of a block before all that trains, which has
        no second one, its first."""
        self._sizes = {}
        try:
            yield self._sizes
        finally:
            self._sizes = None

    def _run(self, numbers: dict[nn.Module, int], block: nn.Module, *inputs: Any) -> Any:
        """Run `block`; a network calls it in place of its own function. `numbers`: its blocks, in the order in which
        they ran first."""
        number = numbers.setdefault(block, len(numbers))
        self._num_known = len(numbers)
        if number >= self.num_blocks:
            return block(*inputs)
        return self._checkpoint(block if self._sizes is None else self._measuring(number, block), *inputs)

    def _measuring(self, number: int, block: nn.Module) -> Callable[..., Any]:
        sizes = self._sizes
        assert sizes is not None

        def run(*inputs: Any) -> Any:
            before = device_memory.allocated_bytes()
            try:
                return block(*inputs)
            finally:  # the second forward is left by an exception as soon as it has all that backward needs
                sizes[number] = device_memory.allocated_bytes() - before

        return run


def recompute_from_host(block: Callable[..., Any], *inputs: Any) -> Any:
    """Run `block`, recompute it in backward, and keep its inputs in host memory until then."""
    moving = {_storage(value) for value in inputs if isinstance(value, Tensor) and value.requires_grad}

    def to_host(tensor: Tensor) -> Tensor | tuple[torch.device, Tensor]:
        if _storage(tensor) not in moving:
            return tensor
        copy = torch.empty_like(tensor, device=HOST, pin_memory=tensor.device.type != "cpu")
        return tensor.device, copy.copy_(tensor, non_blocking=True)

    def to_device(kept: Tensor | tuple[torch.device, Tensor]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        device, copy = kept
        return copy.to(device, non_blocking=True)

    # inside a block `checkpoint` has hooks of its own, so that these see the block's inputs only
    with saved_tensors_hooks(to_host, to_device):
        return checkpoint(block, *inputs, use_reentrant=False)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
