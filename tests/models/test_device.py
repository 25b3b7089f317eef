# SPDX-License-Identifier: Apache-2.0
"""Every architecture on the pretend device (`tests.pretend`): nothing mixes devices, and stalls keep to docs/gpu.md."""

from pathlib import Path

import pytest

from tests.grid import IN_GRID
from tests.pretend.__main__ import documented, numbers
from tests.pretend.phases import ARCHITECTURES, measure
from tests.pretend.process import on_pretend
from tests.tiny_models import build_tiny

QUICK = ("qwen_image", "wan2.1")
"""Measured by every test run, the others in the grid."""
THEIRS = ("diffusers/", "transformers/")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=IN_GRID) for name in ARCHITECTURES]
)
def test_an_architecture_runs_within_its_budget_of_stalls(name: str, tmp_path: Path) -> None:
    """Encode, sample, decode, evaluate, backward, sleep, wake and update, as in a replica and on a trainer."""
    measured = on_pretend(measure, name, build_tiny(name, tmp_path / name))
    found, budget = numbers(measured), documented()[name]
    more = {column: (number, budget[column]) for column, number in found.items() if number > budget[column]}
    assert not more, f"(measured, in docs/gpu.md): {more}\n" + "\n".join(
        f"{phase}: {', '.join(record.lines())}" for phase, record in measured.records.items()
    )
    assert found["step"] <= 1
    for phase in ("evaluate", "backward"):
        assert all(place.startswith(THEIRS) for _, place in measured.records[phase].stalls), phase
    assert measured.log_prob_gap == 0 and measured.has_gradients
    assert measured.memory_asleep == 0


def test_every_architecture_is_documented() -> None:
    assert tuple(documented()) == ARCHITECTURES
