# SPDX-License-Identifier: Apache-2.0
"""Random weights that make a tiny network sensitive to all its inputs.

Invariant (tests/models/test_parity.py): no weight keeps a constructor's zeros, which would hide the effect of
earlier layers.
"""

from __future__ import annotations

from torch import nn


def draw_weights(module: nn.Module, gain: float = 1.0) -> None:
    """Draw matrices with std gain/sqrt(fan_in), biases with std 0.3, norm weights around 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "gamma" not in name:
            nn.init.normal_(parameter, std=gain / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1)
