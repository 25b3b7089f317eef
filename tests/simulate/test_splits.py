# SPDX-License-Identifier: Apache-2.0
"""The search over splits."""

from verl_digen.tools.simulate.splits import GRID_POINTS, lowest


def test_a_long_range_is_narrowed_down_with_few_trials():
    tried = set()

    def step_s(number: int) -> float:
        tried.add(number)
        return abs(number - 637)

    assert lowest(0, 1023, step_s) == 637
    assert len(tried) <= 4 * GRID_POINTS
    assert [lowest(1, 9, lambda number, best=best: abs(number - best)) for best in range(1, 10)] == [*range(1, 10)]
