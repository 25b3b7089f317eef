# SPDX-License-Identifier: Apache-2.0
"""docs/configuration.md is what its generator makes of the dataclasses, and names no key that does not exist."""

from __future__ import annotations

from tests.docs.configuration import MARK, PAGE, generated


def test_the_page_is_what_the_dataclasses_say():
    _, mark, below = PAGE.read_text(encoding="utf-8").partition(MARK)
    assert mark and below.strip() == generated().strip(), "run: python -m tests.docs.configuration --write"


def test_every_section_and_a_setting_of_a_loss_are_there():
    page = generated()
    for heading in ("## digen.sampling", "### digen.reward.hacking", "## digen.deadlines"):
        assert f"\n{heading}\n" in page
    assert "| `clip_range` |" in page and "| `max_batch_size` | `8` | Maximum samples of one call." in page
