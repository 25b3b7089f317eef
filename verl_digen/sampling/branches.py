# SPDX-License-Identifier: Apache-2.0
"""The two branches of guided sampling: in one forward, or one after the other where device memory is short.

- One forward of both is the faster one: fewer kernels, each larger. Two forwards need half the memory for activations,
  and no padding of prompts to the length of negative prompts.
- `auto` runs the first guided step of each kind of batch in two forwards and measures it. Both branches together take
  at most twice what one took beyond what was allocated before; one forward runs them from the next step on if so much
  is there, less a margin. On a CPU memory does not limit a forward: `auto` is one forward.

Invariant (tests/sampling/test_branches.py): no forward of both runs where its bound exceeds the memory.
"""

import logging
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from verl_digen.platforms import device_memory

logger = logging.getLogger(__name__)


class GuidanceBranches:
    """Chooses for each guided forward, as `digen.rollout.split_guidance` says. With `auto` not for ranks that share a
    forward's collectives.

    Example: 100 GB, of which the network takes 40
        branches = GuidanceBranches("auto", torch.device("cuda"))
        branches.run(kind, forward)  # forward(True): peaks at 60 GB, and 40 + 2 * 20 fit into 90
        branches.run(kind, forward)  # forward(False)
    """

    def __init__(self, setting: bool | str, device: torch.device):
        fixed = setting if isinstance(setting, bool) else False
        self._fixed = None if setting == "auto" and device.type != "cpu" else fixed
        self._splits: dict[Hashable, bool] = {}

    def run(self, kind: Hashable, forward: Callable[[bool], Tensor]) -> Tensor:
        """Call `forward`, with True for two forwards; returns its result. Batches of one `kind` take the same
        memory."""
        if self._fixed is not None:
            return forward(self._fixed)
        if kind in self._splits:
            return forward(self._splits[kind])
        results: list[Tensor] = []
        kept, limit = device_memory.allocated_bytes(), device_memory.limit_bytes()
        taken = device_memory.peak_of(lambda: results.append(forward(True))) - kept
        self._splits[kind] = kept + 2 * taken > limit * (1 - device_memory.MARGIN)
        logger.info(
            "guidance runs in %s: one branch takes %.1f GB beside %.1f of %.1f GB",
            "two forwards" if self._splits[kind] else "one forward",
            taken / 1e9,
            kept / 1e9,
            limit / 1e9,
        )
        return results[0]


ONE_FORWARD = GuidanceBranches(False, torch.device("cpu"))
