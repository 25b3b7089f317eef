# SPDX-License-Identifier: Apache-2.0
"""Copies of the trainable weights by policy name, and how they follow.

| policy | weights | in checkpoints |
| --- | --- | --- |
| `average` | `digen.ema`: an average over optimizer steps, for validation and export | yes |
| one that the objective names, e.g. `old` | an average over batches, with the `Decay` of its settings | yes |
| `reference` | the initial weights, frozen (of a new LoRA no copy: the adapter is switched off) | no |
| `reference` that the objective renews | the weights after every n-th step; with LoRA a copy, too | yes |
| `teacher` | the adapter in `digen.loss.teacher`, frozen | no |
| `old` of other objectives | from before the first of several optimizer steps on the same samples | no |

A copy is each rank's own shards: they are copied, averaged and exchanged in place, without a collective. With
`reshard_after_forward=false` FSDP2 keeps gathered parameters beyond a forward, so a swap starts by resharding.

Invariants (tests/engine/test_copies.py): a copy follows only steps that changed the weights; after `swapped_in` the
weights are bitwise what they were, also if the body raised.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_digen.algorithms.ema import Decay, ema_decay, ema_update_
from verl_digen.config import EmaConfig
from verl_digen.engine.fsdp2 import recover, reshard
from verl_digen.engine.offload import wait_for

logger = logging.getLogger(__name__)


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
    """A copy of the trained shards of `module` as they are now, on `device`; None: on each shard's own."""

    def __init__(self, module: nn.Module, device: str | None = None):
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


CURRENT = "current"
"""The policy that trains; it has no copy."""
AVERAGE = "average"


class PolicyCopies(dict[str, ShadowWeights]):
    """Policy -> its weights, copies of the trainable shards of `module` (`device` as for `ShadowWeights`). `decays` are
    of the policies that follow once per batch, see `LossConfig.copies`."""

    def __init__(self, module: nn.Module, ema: EmaConfig, decays: Mapping[str, Decay], device: str | None = None):
        self._module, self._device, self._ema, self._decays = module, device, ema, decays
        self._followed = 0
        """Optimizer steps at the last `follow_batch`."""
        self._saved = (*decays, *((AVERAGE,) if ema.enable else ()))
        super().__init__({name: ShadowWeights(module, device) for name in self._saved})

    def keep(self, policy: str) -> None:
        """Copy the weights as they are now."""
        self[policy] = ShadowWeights(self._module, self._device)

    def drop(self, policy: str) -> None:
        """Delete a copy that was kept; copies that follow stay."""
        if policy not in self._saved:
            self.pop(policy, None)

    def follow_step(self, k: int) -> None:
        """Update the average after an optimizer step that changed the weights; `k` such steps came before it."""
        if AVERAGE in self._saved and (k + 1) % self._ema.every_steps == 0:
            self._update(AVERAGE, ema_decay(k, self._ema.max_decay))

    def follow_batch(self, k: int) -> None:
        """Update the policies that follow batches, after the last optimizer step on a batch; `k` steps in all."""
        before, self._followed = self._followed, k
        for policy, decay in self._decays.items():
            if decay.is_due(before, k):
                self._update(policy, decay.at(k))

    def _update(self, policy: str, decay: float) -> None:
        ema_update_(self[policy].shards.values(), local_shards(self._module).values(), decay)

    # -- checkpoints --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Mapping[str, Tensor]]:
        """Copies that follow, live: policy -> parameter name -> tensor, distributed as the parameter is."""
        return {policy: self[policy].tensors for policy in self._saved}

    def resume(self, loaded: Collection[str], num_updates: int) -> None:
        """Go on after `num_updates` optimizer steps; a copy that was not loaded starts from the weights as they are."""
        self._followed = num_updates
        for policy in self._saved:
            if policy not in loaded:
                logger.warning("the checkpoint has no copy of policy %s; it starts from the loaded weights", policy)
                self.keep(policy)
