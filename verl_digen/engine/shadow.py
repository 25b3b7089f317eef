# SPDX-License-Identifier: Apache-2.0
"""A second copy of the trained weights, kept as each rank's own shards: one policy of `copies`.

- No collective: shards are copied, averaged and exchanged in place.
- `swapped_in` puts the copy in place of the weights and back again. With `reshard_after_forward=false` FSDP2 keeps
  gathered parameters beyond a forward; so both ways start by resharding, and the next forward gathers again.

Invariant: after `swapped_in` the weights are bitwise what they were, also if the body raised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_digen.engine.gathered import recover, reshard
from verl_digen.engine.offload import wait_for


def local_shard(value: Tensor) -> Tensor:
    """This rank's part of a tensor: the live storage, detached."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def local_shards(module: nn.Module) -> dict[str, Tensor]:
    """This rank's shards of what trains, by parameter name: live storage, detached. Offloaded ones have arrived."""
    reshard(module)
    shards = {name: local_shard(value) for name, value in module.named_parameters() if value.requires_grad}
    wait_for(shards.values())
    return shards


class ShadowWeights:
    """A copy of the trained shards of `module` as they are now.

    Args:
        device: device of the copy; None: each shard's own.
    """

    def __init__(self, module: nn.Module, device: torch.device | str | None = None):
        live = local_shards(module)  # waits for them
        self.tensors = {
            name: value.detach().to(device=device or value.device, copy=True)
            for name, value in module.named_parameters()
            if name in live
        }
        """Parameter name -> its copy, distributed as the parameter is."""
        self.shards = {name: local_shard(value) for name, value in self.tensors.items()}
        """This rank's parts of them."""

    @contextmanager
    def swapped_in(self, module: nn.Module) -> Iterator[None]:
        """Context in which `module` has the copy's weights; do not train it inside."""
        kept = {name: shard.clone() for name, shard in local_shards(module).items()}
        _write(module, self.shards)
        try:
            yield
        except BaseException:
            recover(module)
            raise
        finally:
            _write(module, kept)


@torch.no_grad()
def _write(module: nn.Module, shards: Mapping[str, Tensor]) -> None:
    for name, shard in local_shards(module).items():
        shard.copy_(shards[name])
