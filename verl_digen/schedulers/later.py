# SPDX-License-Identifier: Apache-2.0
"""Ready times of groups that lie far ahead in a batch, by a formula. Pure.

Invariant (tests/schedulers/test_search.py): with slots of one speed they are those of playing chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Sequence


def later_ready_s(
    slots: Sequence[tuple[float, float]], num_groups: int, group_size: int, chunk_size: int, score_s: float
) -> list[float]:
    """Ready times of `num_groups` groups without an issued sample, ascending; O(groups + slots log slots).

    Slots of one speed take chunks in turns: chunk j ends where slot j mod S ends its (j // S)th.

    Args:
        slots: [S] (time at which it is free, seconds of a sample); they count with their mean speed.
    """
    if not slots:
        return [float("inf")] * num_groups
    free = sorted(time for time, _ in slots)
    sample_s = len(slots) / sum(1 / seconds for _, seconds in slots)
    num_chunks = -(-group_size // chunk_size)
    chunk_s = sample_s * group_size / num_chunks
    last = range(num_chunks - 1, num_chunks * num_groups, num_chunks)
    return sorted(free[index % len(free)] + (index // len(free) + 1) * chunk_s + score_s for index in last)
