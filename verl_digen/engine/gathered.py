# SPDX-License-Identifier: Apache-2.0
"""Drop the gathered parameters of an FSDP2 module, in normal operation and after an exception.

With `reshard_after_forward=false`, FSDP2's own `reshard` does nothing while a forward runs. After an exception FSDP2
assumes that the forward still runs, so a reader of the shards would get gathered parameters. Call `recover` first then.

Invariant (tests/engine/test_shadow.py, test_gradients.py): afterwards a module's parameters are its shards.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(module: nn.Module) -> None:
    """Make every FSDP2 unit of `module` drop its gathered parameters. After an exception call `recover` first."""
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.reshard()


def recover(module: nn.Module) -> None:
    """Reset the module after an exception in a forward or backward; the gradient stays."""
    # a module becomes a root in its first forward, before which there is nothing to recover from
    if isinstance(module, FSDPModule) and module._get_fsdp_state()._is_root:
        module.reset_iter_state()
