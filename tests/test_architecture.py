# SPDX-License-Identifier: Apache-2.0
"""The walk through the house names files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_that_the_walk_names_is_there():
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|\.md|\.toml|/))`", text))
    assert len(named) > 40
    places = (ROOT, ROOT / "verl_digen", ROOT / "verl_digen" / "trainer")
    assert [name for name in sorted(named) if not any((place / name).exists() for place in places)] == []
