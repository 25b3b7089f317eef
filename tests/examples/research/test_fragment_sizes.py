# SPDX-License-Identifier: Apache-2.0
"""Cells of the table of fragment sizes are the simulator's."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_digen.devices import Pool
from verl_digen.simulate.cluster import Split, run_split, simulated_rules
from verl_digen.simulate.profile import load_profile

FOLDERS = (Path(__file__).resolve().parents[3] / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")


def test_a_line_has_the_step_with_each_size_and_with_the_default():
    from fragment_sizes import SIZES, TECHNIQUES, line

    profile = load_profile("flux1-12b")
    profile = replace(profile, numbers=replace(profile.numbers, num_prompts=150))
    split = Split(Pool(300, "H800"), Pool(84, "H800"))
    rules = simulated_rules(profile, split, TECHNIQUES)
    found = [
        run_split(profile, split, TECHNIQUES, num_steps=4, rules=replace(rules, max_groups_per_fragment=size)).step_s
        for size in (*SIZES, None)
    ]
    assert rules.largest_fragment == 25, "300 samples"
    expected = [f"{seconds:.1f}" for seconds in found[:-1]] + [f"{found[-1]:.1f} (25 groups)"]
    assert list(line("flux1-12b", 300, 384, None, 4)) == ["`flux1-12b`", "300xH800 + 84xH800", *expected]
