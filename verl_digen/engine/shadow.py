# SPDX-License-Identifier: Apache-2.0
"""A second copy of weights, kept as each rank's own shards: one policy of `copies`, or a teacher.

- No collective: shards are copied, averaged and exchanged in place.
- `swapped_in` puts the copy in place of the weights and back again. With `reshard_after_forward=false` FSDP2 keeps
  gathered parameters beyond a forward; so both ways start by resharding, and the next forward gathers again.

Invariant: after `swapped_in` the weights are bitwise what they were, also if the body raised.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_digen.engine import whole_groups
from verl_digen.engine.gathered import recover, reshard
from verl_digen.engine.offload import wait_for


def local_shard(value: Tensor) -> Tensor:
    """This rank's part of a tensor: the live storage, detached."""
    value = value.detach()
    return value.to_local() if isinstance(value, DTensor) else value


def local_shards(module: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """This rank's shards by parameter name: live storage, detached. Offloaded ones have arrived.

    Args:
        names: parameters, frozen ones too; None: all that train.
    """
    reshard(module)
    shards = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad if names is None else name in names:
            shards[name] = local_shard(parameter)
    wait_for(shards.values())
    return shards


class ShadowWeights:
    """A copy of shards of `module` as they are now.

    Args:
        device: device of the copy; None: each shard's own.
        names: parameters, frozen ones too; None: all that train.
    """

    def __init__(
        self, module: nn.Module, device: torch.device | str | None = None, names: Collection[str] | None = None
    ):
        live = local_shards(module, names)
        self.shards = {name: shard.to(device=device or shard.device, copy=True) for name, shard in live.items()}

    @contextmanager
    def swapped_in(self, module: nn.Module) -> Iterator[None]:
        """Context in which `module` has the copy's weights; do not train it inside."""
        kept = {name: shard.clone() for name, shard in local_shards(module, self.shards.keys()).items()}
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
    if any(not parameter.requires_grad and name in shards for name, parameter in module.named_parameters()):
        whole_groups.release(module)  # gathered memory of frozen parameters would hold the values of before
    for name, shard in local_shards(module, shards.keys()).items():
        shard.copy_(shards[name])
