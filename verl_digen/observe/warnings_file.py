# SPDX-License-Identifier: Apache-2.0
"""`RUN_DIR/warnings.jsonl`: warnings and errors of the driver's loggers, one JSON object per line, for the report.

Example line: `{"at_s": 1795470213.4, "step": 12, "level": "WARNING", "text": "replacing 1 failed groups: ..."}`. `step`
is the number of optimizer steps when it was told. Workers' warnings are on the console alone.

Invariant (tests/observe/test_warnings_file.py): a resumed run keeps the warnings up to its first step; a new one none.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any


class WarningsFile(logging.Handler):
    """A handler of a logger; see the module."""

    def __init__(self, path: Path):
        super().__init__(logging.WARNING)
        self._path, self._began_s = path, time.time()
        self.step = 0
        """Optimizer steps so far; the owner sets it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line; a failure is printed, as `logging` does for any handler."""
        line = {
            "at_s": record.created,
            "step": self.step,
            "level": record.levelname,
            "text": record.getMessage(),
        }
        try:
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:
            self.handleError(record)

    def keep_until(self, step: int) -> None:
        """Drop warnings of earlier starts that were told after `step`; 0 drops all of theirs."""
        if not self._path.exists():
            return
        kept = [
            line
            for line in read_warnings(self._path)
            if line["at_s"] >= self._began_s or (step > 0 and line["step"] <= step)
        ]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")


def read_warnings(path: Path) -> list[dict[str, Any]]:
    """Lines of the file, in order; [] without one. A last line that is still being written is left out."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].split("\n") if line]
