# SPDX-License-Identifier: Apache-2.0
"""Arguments of the checks, and the devices of the quick start."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FIGURES = "figures.jsonl"
"""File in a check's folder: its measurements, written as they come."""
QUICKSTART_PROMPTS = 8
"""Prompts of a step of recipe=digen_quickstart (`data.train_batch_size`)."""


@dataclass(frozen=True)
class Setting:
    """Arguments of every check."""

    folder: Path
    """Empty folder for checkpoints, sockets and logs of one check."""
    num_devices: int
    """Devices of this machine; 1 on a CPU."""
    architecture: str
    """Key of `verl_digen.models.tiny.BUILDERS`."""
    update_mb: int
    """Size of the weight update, in MiB."""
    asleep_mb: int
    """Size of the weights that sleep, in MiB."""

    is_cpu: bool = False
    """True where there is no accelerator: networks of a published size are replaced by tiny ones."""

    def note(self, what: str, **figures: float | str) -> None:
        """Keep measurements at once, so that a check that is killed leaves them."""
        with open(self.folder / FIGURES, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, **figures}) + "\n")

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints that checks share."""
        return self.folder.parent / "checkpoints"

    @property
    def num_ranks(self) -> int:
        """Ranks of the checks of several processes: two where there are two devices."""
        return min(self.num_devices, 2)


def quickstart_devices(found: int) -> int:
    """Devices that the quick start uses, all for both training and generation.

    The most that divide its prompts: ranks share the rows of a step evenly.

    Args:
        found: accelerators of this machine; 0 counts as one device.

    Example:
        [quickstart_devices(found) for found in (0, 1, 2, 3, 6, 8, 16)]  # [1, 1, 2, 2, 4, 8, 8]
    """
    fitting = [count for count in range(1, QUICKSTART_PROMPTS + 1) if QUICKSTART_PROMPTS % count == 0]
    return max(count for count in fitting if count <= max(found, 1))
