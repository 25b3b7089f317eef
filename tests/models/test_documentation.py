# SPDX-License-Identifier: Apache-2.0
"""The documentation of the model files agrees with the code."""

import inspect
import re
from pathlib import Path

import pytest

from verl_digen.models import MODELS, VARIANTS, model_class
from verl_digen.models.base import DiffusionModel

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "own_models.md"
WALK = ROOT / "examples" / "adding_a_model.md"
MAX_LINES = 250


FILES = [*((pipeline, "") for pipeline in MODELS), *((pipeline, key) for pipeline, (key, _) in VARIANTS.items())]
"""Pipelines, and the flag of the index that chooses another file."""


@pytest.mark.parametrize(("pipeline", "key"), FILES)
def test_a_model_file_is_short_and_has_its_place_on_the_page(pipeline: str, key: str) -> None:
    file = Path(inspect.getfile(model_class(pipeline, {key: True})))
    assert len(file.read_text().splitlines()) <= MAX_LINES
    assert [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and f"`{file.name}`" in line]


def test_every_model_file_has_the_required_methods_and_no_others_are_required() -> None:
    required = {f"`{name}`" for name in DiffusionModel.__abstractmethods__}
    (sentence,) = re.findall(r"four other methods are required: (.*?)\.\n", PAGE.read_text(), re.DOTALL)
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
