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
        live = local_shards(module)
        self.shards = {name: shard.to(device=device or shard.device, copy=True) for name, shard in live.items()}

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

    def state_dict(self) -> dict[str, Tensor]:
        """The shards, by parameter name."""
        return self.shards

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load saved shards.

        Raises:
            RuntimeError: the saved parameters are not the ones this run trains.
        """
        if state.keys() != self.shards.keys():
            raise RuntimeError(
                f"the saved average holds {len(state)} parameters, but this run trains {len(self.shards)}, and not "
                "the same; resume with the same LoRA settings"
            )
        for name, shard in self.shards.items():
            shard.copy_(state[name])


@torch.no_grad()
def _write(module: nn.Module, shards: Mapping[str, Tensor]) -> None:
    for name, shard in local_shards(module).items():
        shard.copy_(shards[name])
