# SPDX-License-Identifier: Apache-2.0
"""The gathered parameters of an FSDP2 module: drop them, in the usual course and after an exception.

FSDP2's own `reshard` does nothing with `reshard_after_forward=false` while a forward runs, and after an exception FSDP2
takes it that the forward still runs. Whoever then looks for the shards finds gathered parameters. So `recover` comes
first.

Invariant (tests/engine/test_shadow.py, test_gradients.py): afterwards a module's parameters are its shards.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(module: nn.Module) -> None:
    """Let every FSDP2 unit of `module` drop its gathered parameters. Not after an exception in a forward."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def recover(module: nn.Module) -> None:
    """Bring the module back from a forward or backward that an exception left half-way; the gradient stays."""
    # a root is one from its first forward on, before which there is nothing to recover from
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        module.reset_iter_state()
