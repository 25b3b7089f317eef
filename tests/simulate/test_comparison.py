# SPDX-License-Identifier: Apache-2.0
"""Comparisons: every run is the simulator's own, on the same devices, and docs/baselines.md shows what comes out."""

from __future__ import annotations

import importlib
import re
from types import ModuleType

import pytest

from tests.simulate.page import ROOT, TEXT, as_row, block
from verl_digen.devices import Pool
from verl_digen.simulate.cluster import COLOCATED, COLOCATED_TSP, Split, run_colocated, run_split
from verl_digen.simulate.comparison import (
    ALONE,
    ELSEWHERE,
    EVERYTHING,
    GAP_TSP,
    STRICT,
    compare,
    run_separate,
    with_reward,
)
from verl_digen.simulate.costs import train_s
from verl_digen.simulate.profile import load_profile
from verl_digen.simulate.splits import best_split
from verl_digen.simulate.verl_omni import NAME, VERL_OMNI, WINDOW, run_verl_omni, windowed

QWEN, MIXED = load_profile("qwen-image-20b"), (Pool(20, "H800"), Pool(24, "A100"))


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """examples/baselines.py."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("baselines")


def test_runs_on_one_type_of_devices_are_the_simulators_and_each_has_all_devices():
    compared, pool = compare(QWEN, [Pool(16, "H800")], num_steps=5), Pool(16, "H800")
    assert list(compared.runs) == [NAME, ELSEWHERE, COLOCATED, COLOCATED_TSP, GAP_TSP, STRICT, EVERYTHING]
    assert {run.num_devices for run in compared.runs.values()} == {16}
    assert compared.runs[NAME].step_s == run_verl_omni(QWEN, pool).step_s
    assert compared.runs[ELSEWHERE].step_s == run_verl_omni(QWEN, pool, reward="elsewhere").step_s
    for name, has_tsp in ((COLOCATED, False), (COLOCATED_TSP, True)):
        assert compared.runs[name].step_s == run_colocated(QWEN, pool, has_tsp=has_tsp).step_s
    for name in (GAP_TSP, STRICT, EVERYTHING):
        split = best_split(QWEN, pool, name.split("+"), num_steps=5)
        assert compared.runs[name].step_s == run_split(QWEN, split, name.split("+"), num_steps=5).step_s
        assert name == EVERYTHING or compared.runs[name].stale == 0
    assert compared.speedup(STRICT, COLOCATED_TSP) == compared.runs[COLOCATED_TSP].step_s / compared.runs[STRICT].step_s


def test_the_share_of_training_is_that_of_the_step_of_colocated_with_tsp():
    compared, numbers = compare(QWEN, [Pool(16, "H800")], num_steps=5), QWEN.numbers
    training_s = train_s(numbers, 32, 16, slowdown=1.0, has_tsp=True) + numbers.commit_s
    assert compared.training_share == pytest.approx(training_s / compared.runs[COLOCATED_TSP].step_s)


def test_two_types_of_devices_are_split_as_given_and_together_at_the_slower_speed():
    compared = compare(QWEN, MIXED, num_steps=5)
    assert compared.devices == "20xH800 + 24xA100"
    for name in (GAP_TSP, STRICT, EVERYTHING):
        assert compared.runs[name].split == Split(*MIXED)
    assert compared.runs[COLOCATED_TSP].step_s == run_colocated(QWEN, Pool(44, "A100"), has_tsp=True).step_s
    assert compared.runs[NAME].step_s == run_verl_omni(QWEN, Pool(44, "A100")).step_s
    assert compared.runs[ALONE].step_s == run_colocated(QWEN, Pool(20, "H800"), has_tsp=True).step_s
    assert compared.runs[ALONE].num_devices == 20


def test_a_reward_model_on_the_devices_takes_every_sample_longer():
    rewarded, pool = with_reward(QWEN, 0.5), Pool(16, "H800")
    plain_s, found_s = (run_colocated(profile, pool, has_tsp=True).step_s for profile in (QWEN, rewarded))
    assert found_s - plain_s == pytest.approx(32 * 0.5)  # 512 samples on 16 devices
    assert "reward model" in rewarded.sources["decode_s"] and rewarded.numbers.row_s == QWEN.numbers.row_s


@pytest.mark.parametrize(
    ("window", "pools"), [(None, MIXED), (WINDOW, MIXED), (WINDOW, (Pool(16, "H800"),))], ids=["own", "two", "search"]
)
def test_the_page_shows_what_is_simulated_again(script, window, pools):
    profile = QWEN if window is None else windowed(QWEN, window)
    row = script.row(profile, pools)
    suffix = "" if window is None else ", window of 2"
    assert as_row(script.seconds_cells(row.plain)) in block(f"seconds{suffix}")
    assert as_row(script.ratio_cells(row)) in block(f"ratios{suffix}")
    alone = [line for line in script.alone_table([row], []) if line.startswith("| `")]
    assert len(alone) == (len(pools) == 2) and set(alone) <= set(block("two types"))


def test_the_page_shows_the_calibration_as_it_is(script):
    assert block("published") == script.published_table(QWEN)
    assert block("parts") == script.parts_table(QWEN)
    assert block("way") == script.way_table()


def test_the_page_has_a_row_for_every_profile_and_number_of_devices(script):
    for name in ("seconds", "ratios", "seconds, window of 2", "ratios, window of 2"):
        found = [tuple(line.split(" | ")[:2]) for line in block(name)[2:]]
        devices = [f"{size}xH800" for size in script.SIZES] + ["20xH800 + 24xA100"]
        assert found == [(f"| `{profile}`", pools) for profile in script.profile_names() for pools in devices]


def test_the_reward_is_counted_once_on_either_side(script):
    """verl-omni's step has its own already; ours is given one."""
    row = script.row(QWEN, MIXED, num_steps=5)
    assert row.rewarded == run_separate(with_reward(QWEN, VERL_OMNI.reward_s), MIXED, EVERYTHING, num_steps=5)
    over = row.over_verl_omni
    assert over["both"] == pytest.approx(run_verl_omni(QWEN, Pool(44, "A100")).step_s / row.rewarded.step_s)
    assert over["free"] > over["elsewhere"] and over["free"] > over["both"] > 1


def test_a_page_without_a_place_for_a_table_is_refused(script):
    page = "a\n<!-- x -->\nold\n<!-- end of x -->\nb\n"
    assert script.filled(page, {"x": ["1", "2"]}) == "a\n<!-- x -->\n1\n2\n<!-- end of x -->\nb\n"
    with pytest.raises(ValueError, match="the page must have <!-- y --> and <!-- end of y -->"):
        script.filled(page, {"y": ["1"]})


def test_the_pages_text_agrees_with_its_tables():
    """Everything on against verl-omni's way with batches of samples, from the table of levers."""
    cells = {line.split(" | ")[0].strip("| "): re.findall(r"([0-9.]+) s", line) for line in block("levers")[2:]}
    slower, faster = cells["samples generated in batches"], cells[f"two pools: {EVERYTHING}"]
    ratios = sorted(float(before) / float(after) for before, after in zip(slower, faster, strict=True))
    assert f"{ratios[0]:.1f} to {ratios[-1]:.1f} times as fast (32 H800, window of 2)" in " ".join(TEXT.split())
    assert f"the devices that generate: {VERL_OMNI.reward_s} s for each sample" in TEXT
