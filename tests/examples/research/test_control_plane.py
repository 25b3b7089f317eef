# SPDX-License-Identifier: Apache-2.0
"""Calls and memory of the control plane, counted; no times."""

from dataclasses import replace
from pathlib import Path

import pytest

from verl_digen.bench.command import RECIPE, compose_bench
from verl_digen.config import digen_config
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


# -- the mode with verl-omni's settings: our config accepts them ---------------------------------------------
def test_its_settings_are_accepted_and_are_those_of_the_published_recipe():
    from peer import peer_mode

    config = compose_bench((RECIPE,), peer_mode().overrides)
    digen = digen_config(config)
    assert (digen.tsp.extents, digen.tsp.reduce) == ((16, 1), "tile")
    assert digen.old_log_probs == "recompute" and digen.rollout.max_batch_size == 1
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size and actor.ppo_epochs == 1


# -- processes that are devices, and a CPU quota for cgroups of both versions --------------------------------
def test_ranks_and_servers_are_devices():
    from limited_cores import DEVICE

    devices = ("WorkerDict", "WorkerDict.actor_accumulate", "DiffusersServer", "vLLMOmniHttpServer.generate")
    assert all(DEVICE.match(f"ray::{title}") for title in devices)
    others = ("DiffusionAgentLoopWorker", "ReplicaWorker", "TaskRunnerV1.run", "IDLE")
    assert not any(DEVICE.match(f"ray::{title}") for title in others)


def test_a_quota_is_written_in_the_words_of_either_version(tmp_path):
    from limited_cores import CpuLimits

    for version, files in {
        "v1": {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "4500"},
        "v2": {"cpu.max": "4500 10000"},
    }.items():
        root = tmp_path / version
        root.mkdir()
        if version == "v2":
            (root / "cgroup.controllers").write_text("cpu memory")
        CpuLimits(root, 0.45).limit(1234)
        (folder,) = (path for path in root.iterdir() if path.is_dir())
        assert {path.name: path.read_text() for path in (folder / "1234").iterdir()} == {
            **files,
            "cgroup.procs": "1234",
        }
