# SPDX-License-Identifier: Apache-2.0
"""A server whose process has a CUDA driver: one that reads its variable when it is first asked, and never again."""

import os
from pathlib import Path

import torch

READ: list[str | None] = []
"""The visible-devices variable, whenever the driver was asked."""


def is_available() -> bool:
    READ.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return False


torch.cuda.is_available = is_available  # it starts the driver; before verl, which calls it while it is imported
import verl.utils.device  # noqa: E402, F401


class Server:
    """A server of either kind; takes what verl or the replica gives it."""

    def __init__(self, **arguments):
        self.arguments = arguments

    async def ready(self):
        return True

    async def visible_devices(self):
        from verl_digen.rollout.birth import visible_device

        return [visible_device(0)]

    def reserved_bytes(self):
        return self.arguments["reserved_bytes"]

    def read_by_the_driver(self):
        return READ[0]

    def environment_at_start(self):
        """The environment that the process was started with; setting `os.environ` does not change it."""
        entries = Path("/proc/self/environ").read_text(encoding="utf-8").split("\0")
        return dict(entry.split("=", 1) for entry in entries if entry)
