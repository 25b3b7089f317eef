# SPDX-License-Identifier: Apache-2.0
"""Code blocks of README.md and of the pages in docs/, and the commands in them.

A block is fenced and names its language. A comment above it, which no reader sees, may say how it is tested:

    <!-- on: recipe=digen_sd3 -->        its lines of KEY=VALUE are added to these words
    <!-- not run: REASON -->             nothing here can check it; the shell's syntax is checked all the same
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
LANGUAGES = ("bash", "diff", "json", "python", "text", "yaml", "dockerfile")
FENCE = re.compile(r"^( *)```(.*)$")
MARKER = re.compile(r"^<!-- (on|not run): (.+) -->$")
VARIABLE = re.compile(r"^[A-Z_]+=\S*$")
"""A word in front of a command that sets a variable of its environment."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    """Path below the repository."""
    line: int
    """Number of the line with the fence."""
    language: str
    text: str
    on: str | None = None
    """Words that the block's lines are added to."""
    reason: str | None = None
    """Reason for not checking its commands."""

    @property
    def name(self) -> str:
        """PAGE:LINE, which an editor opens."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command, as the shell splits them; without comments, variables in front, and `...`."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "..."]
            while words and VARIABLE.match(words[0]):
                words.pop(0)
            if words:
                found.append(words)
        return found


def blocks_of(page: Path) -> Iterator[Block]:
    """Every fenced block of a page."""
    name = page.relative_to(ROOT).as_posix()
    lines = page.read_text(encoding="utf-8").splitlines()
    opened: tuple[int, str, str] | None = None
    markers: dict[str, str] = {}
    text: list[str] = []
    for number, line in enumerate(lines, start=1):
        fence = FENCE.match(line)
        if opened is None and fence:
            opened, text = (number, fence[1], fence[2].strip()), []
        elif opened is None:
            marker = MARKER.match(line.strip())
            markers = (markers | {marker[1]: marker[2]}) if marker else {} if line.strip() else markers
        elif fence and not fence[2]:
            start, indent, language = opened
            body = "\n".join(one.removeprefix(indent) for one in text)
            yield Block(name, start, language, body, markers.get("on"), markers.get("not run"))
            opened, markers = None, {}
        else:
            text.append(line)
    assert opened is None, f"{name}:{opened and opened[0]}: the block has no end"


def indented_lines(page: Path) -> Iterator[str]:
    """PAGE:LINE of code that is indented in place of fenced; no test would know its language."""
    is_fenced, before = False, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if FENCE.match(line):
            is_fenced = not is_fenced
        elif not is_fenced and line.startswith("    ") and line.strip() and not before.strip():
            yield f"{page.relative_to(ROOT).as_posix()}:{number}"
        before = line


BLOCKS = [block for page in PAGES if page.exists() for block in blocks_of(page)]
