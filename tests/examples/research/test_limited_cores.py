# SPDX-License-Identifier: Apache-2.0
"""Processes that are devices, and a CPU quota for cgroups of both versions."""

from pathlib import Path

import pytest

FOLDERS = (Path(__file__).resolve().parents[3] / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")


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
