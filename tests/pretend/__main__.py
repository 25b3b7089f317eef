# SPDX-License-Identifier: Apache-2.0
"""Table of docs/gpu.md: stalls of every architecture by phase; the main prints it, and the lines that stall."""

import tempfile
from pathlib import Path

from tests.pretend.phases import ARCHITECTURES, Measured, measure
from tests.pretend.process import on_pretend
from tests.tiny_models import build_tiny

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
COLUMNS = ("encode", "step", "sample", "decode", "evaluate", "backward", "sleep", "wake", "update", "float64", "masked")
HEAD = ("architecture", *COLUMNS)


def numbers(measured: Measured) -> dict[str, int]:
    """Column -> number, of one architecture."""
    records = measured.records
    stalls = {phase: record.num_stalls for phase, record in records.items()}
    return stalls | {
        "step": measured.stalls_per_step,
        "float64": sum(records["evaluate"].float64.values()),
        "masked": sum(records["evaluate"].masks.values()),
    }


def render(rows: dict[str, dict[str, int]]) -> str:
    """The table as Markdown."""
    lines = [HEAD, ("---",) * len(HEAD)]
    lines += [(name, *(str(row[column]) for column in COLUMNS)) for name, row in rows.items()]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def documented() -> dict[str, dict[str, int]]:
    """The document's rows."""
    lines = DOCUMENT.read_text().splitlines()
    start = lines.index(f"| {' | '.join(HEAD)} |") + 2
    rows = {}
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = dict(zip(COLUMNS, map(int, cells), strict=True))
    return rows


def main() -> None:
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            measured = on_pretend(measure, name, build_tiny(name, Path(folder) / name))
            rows[name] = numbers(measured)
            for phase, record in measured.records.items():
                print(name, phase, *record.lines(), sep="\n    ")
    print(render(rows))


if __name__ == "__main__":
    main()
