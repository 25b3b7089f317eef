# SPDX-License-Identifier: Apache-2.0
"""The table of docs/algorithms/README.md against the recipes, the objectives and the tests that there are."""

import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_digen.algorithms.objectives import find_objective, objective_names

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms" / "README.md"
RECIPES = ROOT / "recipes"
NO_ALGORITHMS = {
    *("digen_base", "digen_cpu", "digen_machine", "digen_quickstart", "digen_tiny_ocr", "digen_tiny_edit"),
    *("digen_edit_episodes", "digen_flux", "digen_flux2_klein", "digen_flux_kontext", "digen_ltx2", "digen_sd3"),
    *("digen_qwen_image", "digen_qwen_image21", "digen_qwen_image_edit", "digen_z_image"),
    *("digen_hunyuan_video", "digen_hunyuan_video15", "digen_hunyuan_video15_i2v"),
    *("digen_wan2_1", "digen_wan2_1_i2v", "digen_wan2_2", "digen_wan2_2_i2v", "digen_wan2_2_ti2v"),
    *("geneval", "ocr", "pickscore", "disaggregated", "vllm_omni", "gpu24", "gpu48", "gpu80", "distilled"),
}
"""Recipes that choose no algorithm."""
VARIANTS = {"awm_off_policy": "awm"}
"""Objective that is named on top of a recipe -> the objective of which it is a variant."""
LEVELS = ("learns", "runs", "composes")


def rows() -> dict[str, tuple[str, str, str]]:
    """Recipe -> (objective, level, shown by) of the table."""
    found = {}
    for line in PAGE.read_text().splitlines():
        if match := re.fullmatch(r"\| `(\w+)` \| (.+?) \| (\w+) \|(.*)\|", line):
            found[match[1]] = match[2].strip("`"), match[3], match[4].strip()
    return found


TABLE = rows()


def text_of(shown: str) -> str:
    """The text of the pages and tests that a row names."""
    names = [PAGE.parent / page for page in re.findall(r"\]\((\S+?)\)", shown)]
    names += [ROOT / name for name in re.findall(r"`(tests/\S+?)`", shown)]
    return "\n".join(name.read_text() for name in names)


def named_in_runs() -> set[str]:
    """Recipes that the end-to-end tests name."""
    strings = [
        string
        for file in sorted((ROOT / "tests" / "e2e").glob("*.py"))
        for string in re.findall(r'"(.*?)"', file.read_text())
    ]
    return {name for string in strings for name in re.split(r"[\[\],+]", string)} & {*TABLE}


def test_each_recipe_of_an_algorithm_has_a_row_in_alphabetic_order():
    recipes = {path.stem for path in RECIPES.glob("*.yaml")}
    assert recipes >= NO_ALGORITHMS
    missing = recipes - NO_ALGORITHMS - {*TABLE}
    assert not missing, f"docs/algorithms/README.md needs a row for {sorted(missing)}, or NO_ALGORITHMS an entry"
    assert {*TABLE} <= recipes, "a row whose recipe is gone"
    assert [*TABLE] == sorted(TABLE)


@pytest.mark.parametrize("recipe", TABLE)
def test_a_row_is_what_its_recipe_and_the_tests_say(recipe: str):
    objective, level, shown = TABLE[recipe]
    settings = OmegaConf.load(RECIPES / f"{recipe}.yaml")
    assert level in LEVELS
    name = OmegaConf.select(settings, "digen.loss.name")
    if name is not None:
        assert objective == name and name in objective_names()
    text = text_of(shown)
    if level == "learns":
        has_curve = re.search(rf"digen_quickstart\+{recipe}\b", text) or f"| `{objective}` |" in text
        assert has_curve or "tests/learning/" in shown
    elif level == "runs":
        assert "tests/e2e/" in shown
    else:
        assert shown == ""
    for test in re.findall(r"`(tests/e2e/\S+?)`", shown):
        assert re.search(rf'[",\[+]{recipe}[",\]+]', (ROOT / test).read_text()) or recipe == "digen_flowgrpo", test
    assert level != "composes" or recipe not in named_in_runs(), "an end-to-end test runs it: its level is runs"
    curves = re.findall(r"^\| `(\w+)` \| \d", (PAGE.parent / "learning.md").read_text(), re.MULTILINE)
    shared = TABLE["digen_flowgrpo"][0]  # the loss of several recipes, whose curves have their names
    assert level == "learns" or not {recipe, objective} & ({*curves} - {shared}), "it has a curve: its level is learns"


def test_an_objective_of_forward_points_has_a_recipe():
    """Others can be named alone, on top of any recipe that records steps."""
    package = [name for name in objective_names() if find_objective(name).compute.__module__.startswith("verl_")]
    forward = {name for name in package if find_objective(name).points == "forward"}
    assert VARIANTS.keys() <= forward
    forward = {VARIANTS.get(name, name) for name in forward}
    assert forward <= {objective for objective, _, _ in TABLE.values()}
