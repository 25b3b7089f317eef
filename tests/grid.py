# SPDX-License-Identifier: Apache-2.0
"""Further values of a grid that CI leaves out: `make test-grids`."""

from collections.abc import Iterable
from typing import Any

import pytest

IN_GRID = (pytest.mark.long, pytest.mark.grid)
"""Marks of a value whose other values are no long tests."""


def in_grid(values: Iterable[Any]) -> list[Any]:
    """Mark values of `pytest.mark.parametrize` with `grid`."""
    return [pytest.param(value, marks=pytest.mark.grid) for value in values]
