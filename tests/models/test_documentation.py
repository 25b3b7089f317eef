# SPDX-License-Identifier: Apache-2.0
"""The documentation of the model files agrees with the code."""

import inspect
import re
from pathlib import Path

import pytest

from verl_digen.models import MODELS, VARIANTS, model_class
from verl_digen.models.base import DiffusionModel

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "models.md"
WALK = ROOT / "examples" / "adding_a_model.md"
MAX_LINES = 250


FILES = [*((pipeline, "") for pipeline in MODELS), *((pipeline, key) for pipeline, (key, _) in VARIANTS.items())]
"""Pipelines, and the flag of the index that chooses another file."""


def row(pipeline: str, key: str) -> list[str]:
    """A model file's name, number of lines, and the optional methods it overrides."""
    found = model_class(pipeline, {key: True})
    file = Path(inspect.getfile(found))
    optional = [name for name in vars(DiffusionModel) if name in vars(found) and not name.startswith("_")]
    overrides = sorted(f"`{name}`" for name in optional if name not in DiffusionModel.__abstractmethods__)
    return [f"`{file.name}`", str(len(file.read_text().splitlines())), ", ".join(overrides) or "-"]


@pytest.mark.parametrize(("pipeline", "key"), FILES)
def test_the_page_says_how_long_a_model_file_is_and_what_it_overrides(pipeline: str, key: str) -> None:
    expected = row(pipeline, key)
    file, lines = expected[:2]
    assert int(lines) <= MAX_LINES
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if file in line]
    tables = [cells[1:4] for cells in rows if len(cells) == 5]
    assert tables == [expected], f"the row must read: ... | {' | '.join(expected)} | ..."


def test_every_model_file_has_the_required_methods_and_no_others_are_required() -> None:
    required = {f"`{name}`" for name in DiffusionModel.__abstractmethods__}
    (sentence,) = re.findall(r"Seven methods are required: (.*?)\.\n", PAGE.read_text(), re.DOTALL)
    assert set(re.findall(r"`\w+`", sentence)) == required


def test_the_walk_shows_the_code_that_there_is() -> None:
    blocks = re.findall(r"<!-- (\S+) -->\n```(?:python|yaml)\n(.*?)```", WALK.read_text(), re.DOTALL)
    assert len(blocks) >= 8
    for file, block in blocks:
        assert block in (ROOT / file).read_text(), f"{WALK.name} shows code that is no longer in {file}:\n{block}"


def test_the_walk_leaves_no_method_out() -> None:
    shown = WALK.read_text()
    for name in DiffusionModel.__abstractmethods__:
        assert f"def {name}(" in shown, name
