# SPDX-License-Identifier: Apache-2.0
"""Calls and memory of the control plane, counted; no times."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_digen.devices import Pool
from verl_digen.schedulers.bubbles import MAX_STREAM, bubble_at
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.rules import BatchRules
from verl_digen.simulate.cluster import Split
from verl_digen.simulate.profile import load_profile

FOLDERS = (Path(__file__).resolve().parents[2] / "examples",)
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


def test_what_a_search_plays_does_not_grow_with_the_batch():
    sizes = []
    for num_prompts in (64, 512):
        rules = BatchRules(num_prompts, 24, num_trainer_ranks=8, assist="bts")
        slots = [f"slot{index}" for index in range(16)]
        durations = KnownDurations(dict.fromkeys(slots, 1.0), [1.0] * 24, 0.1, [1.0] * 8)
        planner = BatchPlanner(rules, durations, first_batch=0, num_batches=1)
        for slot in slots:
            planner.on_slot_joined(slot, replica=slot, version=0)
        planner.on_prompts(0, [f"{index:04d}" for index in range(num_prompts)])
        batch = planner._book.batches[0]
        bubble = bubble_at(0.0, batch=batch, slots=slots, requests=[], live={}, durations=durations, rules=rules)
        assert bubble is not None and sum(bubble.unissued) == 24 * num_prompts
        sizes.append((sum(bubble.unissued) / bubble.chunk_size / bubble.bundle, len(bubble.unissued)))
    assert [groups for _, groups in sizes] == [64, 512]
    assert all(MAX_STREAM / 2 < size <= MAX_STREAM for size, _ in sizes)
