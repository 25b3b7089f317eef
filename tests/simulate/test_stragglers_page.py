# SPDX-License-Identifier: Apache-2.0
"""docs/baselines.md shows what examples/stragglers.py simulates."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from tests.simulate.page import ROOT, TEXT, as_row, block
from verl_digen.simulate.cluster import COLOCATED_TSP, SHARED_QUEUE, run_colocated
from verl_digen.simulate.comparison import EVERYTHING, STRICT, run_separate
from verl_digen.simulate.profile import load_profile
from verl_digen.simulate.variance import Variance

WAN = load_profile("wan2.1-14b")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/stragglers.py."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("stragglers")


def test_the_page_shows_what_is_simulated_again(script):
    splits = script.splits_of(WAN, 32)
    for case in ("1 in 32 at half speed", "failures"):
        assert as_row(script.cells(script.row(WAN, 32, case, splits))) in block("variance")


def test_without_variance_a_row_is_that_of_the_other_tables(script):
    row = script.row(WAN, 32, "exact")
    pool = script.Pool(32, "H800")
    for name in (COLOCATED_TSP, SHARED_QUEUE):
        assert row.step_s[name] == pytest.approx(run_colocated(WAN, pool, has_tsp=True).step_s)
    for name in (STRICT, EVERYTHING):
        assert row.step_s[name] == pytest.approx(run_separate(WAN, [pool], name).step_s)


def test_the_page_has_every_case_once_and_the_ranges_are_those_of_its_rows(script):
    body = [line.strip("| ").split(" | ") for line in block("variance")[2:]]
    expected = [
        (f"`{profile}`", str(size), case)
        for profile in script.profile_names()
        for size in script.SIZES
        for case in script.CASES
    ]
    assert [tuple(cells[:3]) for cells in body] == expected
    for line in block("variance, ranges")[2:]:
        cells = line.strip("| ").split(" | ")
        strict = [float(row[7]) for row in body if row[1:3] == cells[:2]]
        assert cells[5] == f"{min(strict):.2f} to {max(strict):.2f}"


def test_all_cases_leave_the_exact_one_first_and_the_failures_have_a_published_rate(script):
    assert next(iter(script.CASES)) == script.EXACT and script.CASES[script.EXACT] == Variance()
    assert f"{script.RATE_PER_H:.2e}" == "1.97e-05" and "1.97e-5" in TEXT
