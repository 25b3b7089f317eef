# SPDX-License-Identifier: Apache-2.0
"""Copies of the trainable weights by policy name, and how they follow.

| policy | weights | in checkpoints |
| --- | --- | --- |
| `average` | `digen.ema`: an average over optimizer steps, for validation and export | yes |
| one that the objective names, e.g. `old` | an average over batches, with the `Decay` of its settings | yes |
| `reference` | full fine-tune: the initial weights, frozen (LoRA: no copy, the adapter is switched off) | no |
| `reference` that the objective renews | the weights after every n-th step; with LoRA a copy, too | yes |
| `teacher` | the adapter in `digen.loss.teacher`, frozen | no |
| `old` of other objectives | from before the first of several optimizer steps on the same samples | no |

Invariant (tests/engine/test_copies.py): a copy follows only steps that changed the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping

from torch import Tensor, nn

from verl_digen.algorithms.ema import Decay, ema_decay, ema_update_
from verl_digen.config import EmaConfig
from verl_digen.engine.shadow import ShadowWeights, local_shards

logger = logging.getLogger(__name__)

CURRENT = "current"
"""The policy that trains; it has no copy."""
AVERAGE = "average"


class PolicyCopies(Mapping[str, ShadowWeights]):
    """Policy -> its weights.

    Args:
        copy: copies the trainable shards of `module` as they are now.
        ema: `digen.ema`.
        decays: policies that follow once per batch, see `LossConfig.copies`.
    """

    def __init__(
        self, module: nn.Module, copy: Callable[[], ShadowWeights], ema: EmaConfig, decays: Mapping[str, Decay]
    ):
        self._module, self._copy, self._ema, self._decays = module, copy, ema, decays
        self._followed = 0
        """Optimizer steps at the last `follow_batch`."""
        self._saved = (*decays, *((AVERAGE,) if ema.enable else ()))
        self._weights: dict[str, ShadowWeights] = {name: copy() for name in self._saved}

    def __getitem__(self, policy: str) -> ShadowWeights:
        return self._weights[policy]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def keep(self, policy: str) -> None:
        """Copy the weights as they are now."""
        self._weights[policy] = self._copy()

    def drop(self, policy: str) -> None:
        """Delete a copy that was kept; copies that follow stay."""
        if policy not in self._saved:
            self._weights.pop(policy, None)

    def follow_step(self, k: int) -> None:
        """Update the average after an optimizer step that changed the weights; `k` such steps came before it."""
        if AVERAGE in self._saved and (k + 1) % self._ema.every_steps == 0:
            self._update(AVERAGE, ema_decay(k, self._ema.max_decay))

    def follow_batch(self, k: int) -> None:
        """Update the policies that follow batches, after the last optimizer step on a batch; `k` steps in all."""
        if k > self._followed:
            before, self._followed = self._followed, k
            for policy, decay in self._decays.items():
                if decay.is_due(before, k):
                    self._update(policy, decay.at(k))

    def _update(self, policy: str, decay: float) -> None:
        ema_update_(self._weights[policy].shards.values(), local_shards(self._module).values(), decay)

    # -- checkpoints --------------------------------------------------------------------------------------
    def state_dict(self) -> dict[str, Mapping[str, Tensor]]:
        """Copies that follow, live: policy -> parameter name -> tensor, distributed as the parameter is."""
        return {policy: self._weights[policy].tensors for policy in self._saved}

    def resume(self, loaded: Collection[str], num_updates: int) -> None:
        """Go on after `num_updates` optimizer steps; a copy that was not loaded starts from the weights as they are."""
        self._followed = num_updates
        for policy in self._saved:
            if policy not in loaded:
                logger.warning("the checkpoint has no copy of policy %s; it starts from the loaded weights", policy)
                self.keep(policy)
