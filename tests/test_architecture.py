# SPDX-License-Identifier: Apache-2.0
"""The walk through the house names files that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_that_the_walk_names_is_there():
    """A bare name is a file beside the one that is named before it in the line."""
    missing, num_named = [], 0
    for line in (ROOT / "docs" / "architecture.md").read_text().splitlines():
        beside = ROOT / "verl_digen" / "trainer"
        for name in re.findall(r"`([\w/]+(?:\.py|\.md|\.toml|/))`", line):
            num_named += 1
            found = next(
                (place / name for place in (ROOT, ROOT / "verl_digen", beside) if (place / name).exists()), None
            )
            if found is None:
                missing.append(name)
            else:
                beside = found.parent
    assert num_named > 40
    assert missing == []
