# SPDX-License-Identifier: Apache-2.0
"""`RUN_DIR/metrics.jsonl`: one JSON object per step, continued by a resumed run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any


class MetricsFile:
    """Example line: `{"step": 12, "reward/mean": 0.71, "perf/step_s": 2.5, ...}`."""

    def __init__(self, path: Path):
        self._path = path

    def keep_until(self, step: int) -> None:
        """Drop the lines of steps after `step`, which a run resumed there repeats; 0 drops all."""
        if not self._path.exists():
            return
        lines = self._path.read_text().splitlines()
        kept = [line for line in lines if step > 0 and json.loads(line)["step"] <= step]
        self._path.write_text("".join(line + "\n" for line in kept))

    def append(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one step's numbers; values that are not numbers are left out."""
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
