# SPDX-License-Identifier: Apache-2.0
"""A reward worker that dies. In a file of its own, so that its process starts without torch."""

import asyncio
import os
from pathlib import Path


class MortalWorker:
    """Dies on a sample as often as the sample says."""

    def __init__(self, folder: Path, unused: bytes):
        self.folder = folder

    async def compute_score(self, sample: tuple[int, int]) -> float:
        name, num_deaths = sample
        record = self.folder / str(name)
        count = len(record.read_text()) if record.exists() else 0
        if count < num_deaths:
            record.write_text("x" * (count + 1))
            os._exit(1)
        await asyncio.sleep(0.05)
        return name / 10
