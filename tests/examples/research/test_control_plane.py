# SPDX-License-Identifier: Apache-2.0
"""Calls and memory of the control plane, counted; no times."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_digen.devices import Pool
from verl_digen.simulate.cluster import Split
from verl_digen.simulate.profile import load_profile

FOLDERS = (Path(__file__).resolve().parents[3] / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")

PROFILE = replace(load_profile("flux1-12b"), numbers=replace(load_profile("flux1-12b").numbers, num_prompts=32))
SPLIT = Split(Pool(40, "H800"), Pool(24, "H800"))
SAMPLES = PROFILE.numbers.num_prompts * PROFILE.numbers.group_size


def test_a_step_has_a_call_per_chunk_relay_and_replica():
    from control_plane import play

    calls = play(PROFILE, SPLIT, 4).calls_per_step
    assert calls["commit"] == 5  # one per relay, and node of eight ranks
    assert calls["load"] == 24 * 3 / 4  # one per replica and new version; the last step has none
    assert calls["score"] == calls["generate"]
    chunk = -(-PROFILE.numbers.group_size // 24)
    assert calls["generate"] + calls.get("assist", 0) / 5 >= SAMPLES / PROFILE.numbers.group_size
    assert calls["generate"] <= SAMPLES / chunk
    assert calls["train"] * 4 % 5 == 0
    assert calls["train"] <= 5 * PROFILE.numbers.num_prompts


@pytest.mark.parametrize("factor", [1, 8])
def test_memory_grows_by_less_than_a_kilobyte_per_sample(factor):
    from control_plane import large, peak_bytes

    profile = large(load_profile("flux1-12b"), 64 * factor)
    assert peak_bytes(profile, SPLIT, 2) < 10**6 + 1_000 * profile.numbers.num_prompts * profile.numbers.group_size
