# SPDX-License-Identifier: Apache-2.0
"""Announcements through a real TransferQueue."""

from __future__ import annotations

import asyncio

import pytest

from tests.engine.harness import described
from verl_digen.engine.ahead import announced_fragment
from verl_digen.engine.fragment import Upcoming
from verl_digen.store.upcoming import announce


@pytest.mark.slow
def test_ranks_read_the_newest_announcement(queue: None):
    assert announced_fragment() is None
    samples = tuple(described(f"g0_{index}_3", "g0", 0.5, 2, index) for index in range(3))
    for after in ("f7", "f8"):
        asyncio.run(announce(Upcoming(after, samples).packed()))
        assert announced_fragment() == Upcoming(after, samples)
