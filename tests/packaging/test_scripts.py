# SPDX-License-Identifier: Apache-2.0
"""Every shell script and the Dockerfile pass their linters, which `make lint` runs too."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.packaging.building import ROOT, git

RULE = re.search(r"^SCRIPTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def is_script(path: Path) -> bool:
    """True for a file that a shell runs."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().startswith((b"#!/usr/bin/env bash", b"#!/bin/"))


def test_make_lint_reads_every_script_of_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    assert RULE is not None
    listed = {path.relative_to(ROOT).as_posix() for word in RULE[1].split() for path in ROOT.glob(word)}
    tracked = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    scripts = {name for name in tracked if is_script(ROOT / name)}
    assert scripts == listed
