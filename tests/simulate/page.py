# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/baselines.md."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")


def block(name: str) -> list[str]:
    """Lines of a table of the page."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n(.*?)\n<!-- end of {re.escape(name)} -->", TEXT, re.DOTALL)
    assert found is not None, f"docs/baselines.md lacks the table {name}"
    return found[1].split("\n")


def as_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"
