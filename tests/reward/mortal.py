# SPDX-License-Identifier: Apache-2.0
"""A reward worker that dies or stops. In a separate file, so that its process starts without torch."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_digen.processes.bundles import outcomes


class MortalWorker:
    """Worker that takes `starts_s` to start. A sample is (name, number of signals the worker gets on it, signal)."""

    def __init__(self, folder: Path, unused: bytes, starts_s: float):
        self.folder = folder
        time.sleep(starts_s)

    async def score(self, sample: tuple[int, int, int]) -> float:
        name, num_signals, number = sample
        record = self.folder / str(name)
        count = len(record.read_text()) if record.exists() else 0
        if count < num_signals:
            record.write_text("x" * (count + 1))
            os.kill(os.getpid(), number)
        await asyncio.sleep(0.05 * name)
        return name / 10

    async def score_all(self, samples: Sequence[tuple[int, int, int]]) -> list[Any]:
        return await outcomes([self.score(sample) for sample in samples])
