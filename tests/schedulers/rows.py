# SPDX-License-Identifier: Apache-2.0
"""Rows to partition."""

from collections.abc import Sequence

from verl_digen.schedulers.tiles import Row


def rows_of(num_steps: Sequence[int]) -> list[Row]:
    """All rows of samples with these numbers of trained steps, of one expert: [2, 1] gives (0, 0), (0, 1), (1, 0)."""
    return [Row(sample, step) for sample, count in enumerate(num_steps) for step in range(count)]
