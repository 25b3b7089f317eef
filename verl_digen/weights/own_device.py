# SPDX-License-Identifier: Apache-2.0
"""The device of this process."""

from __future__ import annotations

import torch


def own_device(name: str) -> torch.device:
    """The current device of verl's platform `name`, with its index unless it is the CPU: IPC opens handles by index."""
    return torch.device(name) if name == "cpu" else torch.device(name, torch.accelerator.current_device_index())
