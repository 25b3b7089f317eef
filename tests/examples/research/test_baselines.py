# SPDX-License-Identifier: Apache-2.0
"""docs/baselines.md shows what examples/research/baselines.py simulates, and verl-omni's way is calibrated."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.grid import IN_GRID
from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.cluster import run_colocated
from verl_digen.tools.simulate.profile import load_profile, profile_names, windowed

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")

TEXT = (ROOT / "docs" / "baselines.md").read_text(encoding="utf-8")
QWEN, MIXED = load_profile("qwen-image-20b"), (Pool(20, "H800"), Pool(24, "A100"))


@pytest.fixture
def script(examples: None) -> ModuleType:
    return importlib.import_module("baselines")


@pytest.fixture
def way(examples: None) -> Any:
    return importlib.import_module("as_verl_omni")


def block(name: str) -> list[str]:
    """Lines of a table of the page."""
    found = re.search(rf"<!-- {re.escape(name)} -->\n(.*?)\n<!-- end of {re.escape(name)} -->", TEXT, re.DOTALL)
    assert found is not None, f"docs/baselines.md lacks the table {name}"
    return found[1].split("\n")


@pytest.mark.parametrize(
    ("size", "over", "number"),
    [
        pytest.param("32", "COLOCATED_TSP", 0, marks=IN_GRID),
        pytest.param("32", "NAME", 5, marks=IN_GRID),
        ("mixed", "COLOCATED_TSP", 3),
        ("mixed", "ALONE", 4),
    ],
)
def test_a_row_that_is_simulated_again_lies_in_the_range_of_the_page(script, size, over, number):
    run = script.EVERYTHING if over == "NAME" else script.STRICT
    compared = script.compare(QWEN, MIXED if size == "mixed" else (Pool(int(size), "H800"),))
    low, high = re.findall(r"[0-9.]+", block("summary")[2 + number].split(" | ")[1])
    assert float(low) - 0.005 <= compared.speedup(run, getattr(script, over)) <= float(high) + 0.005


@pytest.mark.long
@pytest.mark.grid
def test_a_line_of_slow_rewards_that_is_simulated_again_is_that_of_the_page(script, monkeypatch):
    monkeypatch.setattr(script, "REWARD_TIMES", (3,))
    *_, line = script.slow_reward_table([load_profile("sd3.5-medium")], script.LADDER_SIZE)
    head, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in block("rewards"))
    (of_page,) = (cells for cells in lines if cells[0] == "3")
    assert line == f"| 3 | {of_page[head.index('`sd3.5-medium`')]} |"


def test_the_page_shows_the_calibration_as_it_is(script):
    assert block("published") == script.published_table(QWEN)


def test_the_pages_text_agrees_with_its_tables(script):
    """Everything on against verl-omni's way with batches of samples, from the table of levers."""
    cells = {line.split(" | ")[0].strip("| "): re.findall(r"([0-9.]+) s", line) for line in block("levers")[2:]}
    slower, faster = cells["samples generated in batches"], cells[f"two pools: {script.EVERYTHING}"]
    ratios = sorted(float(before) / float(after) for before, after in zip(slower, faster, strict=True))
    assert f"{ratios[0]:.1f} to {ratios[-1]:.1f} times as fast (32 H800, window of 2)" in " ".join(TEXT.split())


def test_a_step_of_verl_omnis_way_by_hand(way):
    """Qwen-Image on 4 devices: 128 samples on each, 64 in each of two updates, two timesteps."""
    generate_s = 128 * (10 * 0.08409 + 0.01259) * 226.4 / 107.9
    score_s = 0.2 + 512 * 0.47 / 4
    log_probs_s = 2 * 4 * 32 * 0.08409 * 1.4  # 4 forwards of 32 samples for each timestep; a gather takes 0.19 s
    update_s = 2 * 4 * 16 * 0.2523 * 1.4 + 0.00406  # 4 forwards and backwards of 16 samples for each timestep
    run = way.run_verl_omni(windowed(QWEN, 2), Pool(4, "H800"))
    assert run.step_s == pytest.approx(generate_s + score_s + log_probs_s + 2 * update_s + 10.2)
    assert run.step_s == pytest.approx(420, rel=0.05)


@pytest.mark.parametrize("name", profile_names())
@pytest.mark.parametrize("num_devices", [7, 256])
def test_a_way_that_takes_nothing_more_is_a_colocated_run_and_no_overhead_makes_a_step_shorter(
    script, way, name, num_devices
):
    profile, pool = load_profile(name), Pool(num_devices, "H800")
    published, neutral = script.without_overheads()[0][1], script.without_overheads()[-1][1]
    assert published == way.VERL_OMNI
    alone = replace(neutral, samples_per_micro_batch=1, reward_s=0.0)
    plain_s = run_colocated(profile, pool, has_tsp=False).step_s
    assert way.run_verl_omni(profile, pool, alone).step_s == pytest.approx(plain_s)
    times = [way.run_verl_omni(profile, pool, one, reward).step_s for _, one, reward in script.without_overheads()]
    assert times == sorted(times, reverse=True) and times[-1] <= plain_s * (1 + 1e-9)
