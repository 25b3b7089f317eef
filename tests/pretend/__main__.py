# SPDX-License-Identifier: Apache-2.0
"""Measure all architectures, print their table and the lines that stall; `--write` puts the table into docs/gpu.md."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.pretend.phases import ARCHITECTURES, measure
from tests.pretend.process import on_pretend
from tests.pretend.table import numbers, render, write
from tests.tiny_models import build_tiny


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            measured = on_pretend(measure, name, build_tiny(name, Path(folder) / name))
            rows[name] = numbers(measured)
            for phase, record in measured.records.items():
                print(name, phase, *record.lines(), sep="\n    ")
    print(render(rows))
    if "--write" in sys.argv[1:]:
        write(rows)


if __name__ == "__main__":
    main()
