# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md has the form of Keep a Changelog: headings, sections, their order, versions, dates."""

from __future__ import annotations

import re
from datetime import date

import pytest
from packaging.version import InvalidVersion, Version

from tests.docs.blocks import ROOT

SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
RELEASE = re.compile(r"## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d\d-\d\d)")
FIRST = "## [Unreleased]"


def release_problems(
    heading: str, before: tuple[Version, date] | None
) -> tuple[tuple[Version, date] | None, list[str]]:
    """(version and date of a heading of a release, its problems); `before` is what stands above it."""
    found = RELEASE.fullmatch(heading)
    try:
        here = found and (Version(found[1]), date.fromisoformat(found[2]))
    except (InvalidVersion, ValueError):
        here = None
    if here is None:
        return before, [f"{heading!r} must be ## [X.Y.Z] - YYYY-MM-DD"]
    if before is not None and not (here[0] < before[0] and here[1] <= before[1]):
        return here, [f"{heading!r} must be older than the release above it"]
    return here, []


def problems(text: str) -> list[str]:
    """Breaches of the form, in words."""
    title, *sections = re.split(r"(?m)^(?=## )", text)
    found = [] if title.startswith("# Changelog\n") else ["the first line must be # Changelog"]
    if not sections or sections[0].splitlines()[0] != FIRST:
        found.append(f"the first section must be {FIRST}")
    before = None
    for section in sections:
        heading = section.splitlines()[0]
        if heading != FIRST:
            before, wrong = release_problems(heading, before)
            found += wrong
        elif section is not sections[0]:
            found.append(f"{FIRST} must be there once")
        found += section_problems(heading, section, may_be_empty=heading == FIRST)
    return found


def section_problems(heading: str, text: str, *, may_be_empty: bool) -> list[str]:
    """Breaches below one release: kinds of changes, their order, and lists below them."""
    head, *kinds = re.split(r"(?m)^(?=### )", text)
    names = [kind.splitlines()[0].removeprefix("### ") for kind in kinds]
    found = [f"{heading}: {name!r} must be one of {', '.join(SECTIONS)}" for name in names if name not in SECTIONS]
    known = [SECTIONS.index(name) for name in names if name in SECTIONS]
    if known != sorted(set(known)):
        found.append(f"{heading}: the order is {', '.join(SECTIONS)}, each once, not {', '.join(names)}")
    if not may_be_empty and not kinds:
        found.append(f"{heading} must say what changed")
    if loose := [line for line in head.splitlines()[1:] if line.strip()]:
        found.append(f"{heading}: a change must stand under a kind: {loose[0]!r}")
    for name, kind in zip(names, kinds, strict=True):
        lines = [line for line in kind.splitlines()[1:] if line.strip()]
        if not lines or not lines[0].startswith("- "):
            found.append(f"{heading}, {name}: must be a list")
        found += [
            f"{heading}, {name}: {line!r} must begin with '- ', or two spaces to go on"
            for line in lines
            if not line.startswith(("- ", "  "))
        ]
    return found


def test_the_changelog_has_the_form():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert problems(text) == []
    assert "keepachangelog.com" in text and "semantic versioning" in text


GOOD = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-11-20

### Added

- One thing,
  in two lines.

### Fixed

- Another.

## [0.1.0] - 2026-10-01

### Added

- All.
"""


def test_a_good_one_has_no_problems():
    assert problems(GOOD) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("# Changelog", "# Changes", "first line"),
        ("## [Unreleased]\n\n", "", "first section"),
        ("## [0.1.0]", "## [Unreleased]\n\n## [0.1.0]", "once"),
        ("[0.2.0] -", "0.2.0 -", "must be ## \\[X.Y.Z\\]"),
        ("2026-11-20", "2026-13-20", "must be ## \\[X.Y.Z\\]"),
        ("[0.1.0]", "[0.3.0]", "older"),
        ("2026-10-01", "2026-12-01", "older"),
        ("### Added\n\n- All.\n", "", "say what changed"),
        ("### Fixed", "### Bugs", "one of Added"),
        ("### Fixed", "### Added", "the order"),
        ("### Added\n\n- One", "### Security\n\n- One", "the order"),
        ("- Another.", "Another.", "a list"),
        ("  in two lines.", "in two lines.", "must begin"),
        ("### Added\n\n- All.", "- All.", "under a kind"),
    ],
)
def test_a_breach_of_the_form_is_noticed(old: str, new: str, said: str):
    assert old in GOOD
    found = problems(new.join(GOOD.rsplit(old, 1)) if old != "### Added\n\n- One" else GOOD.replace(old, new))
    assert any(re.search(said, problem) for problem in found), found
