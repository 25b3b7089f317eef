# SPDX-License-Identifier: Apache-2.0
"""The LoRA adapter of a module, switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """Context in which forwards skip the adapter.

    peft's own context also switches `requires_grad`. With `reshard_after_forward=false` it switches it off on the
    shards at entry and on again on the gathered parameters at exit, and the adapter never trains again.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
