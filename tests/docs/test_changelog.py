# SPDX-License-Identifier: Apache-2.0
"""CHANGELOG.md has the form of Keep a Changelog, and stays short."""

import re

from tests.docs.blocks import ROOT

SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
MAX_BYTES = 8192
"""Measurements belong into docs/benchmarks.md."""


def test_the_changelog_has_the_form_and_is_short():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= MAX_BYTES
    title, first, *releases = re.split(r"(?m)^(?=## )", text)
    assert title.startswith("# Changelog\n") and "keepachangelog.com" in title
    assert first.startswith("## [Unreleased]\n")
    for release in releases:
        assert re.match(r"## \[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d\n", release), release.splitlines()[0]
    for section in (first, *releases):
        kinds = re.findall(r"(?m)^### (.*)$", section)
        assert kinds == [one for one in SECTIONS if one in kinds]
