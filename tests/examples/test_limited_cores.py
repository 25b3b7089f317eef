# SPDX-License-Identifier: Apache-2.0
"""Processes that are devices get a CPU quota, others none, with cgroups of both versions."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = (EXAMPLES,)
pytestmark = pytest.mark.usefixtures("examples")

TITLES = {
    "ray::WorkerDict": True,
    "ray::WorkerDict.actor_accumulate": True,
    "ray::DiffusersServer": True,
    "ray::vLLMOmniHttpServer.generate": True,
    "ray::DiffusionAgentLoopWorker": False,
    "ray::CheckpointEngineWorker": False,
    "ray::TaskRunnerV1.run": False,
    "ray::IDLE": False,
}
"""Title of a process of a run -> whether it is a device."""


@pytest.mark.parametrize("title, is_device", TITLES.items())
def test_ranks_and_servers_are_devices(title, is_device):
    from limited_cores import DEVICE

    assert bool(DEVICE.match(title)) == is_device


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


SCRIPT = """
import subprocess, sys, time
burn = '''
import sys, time
deadline_s = time.monotonic() + float(sys.argv[1])
while "limited_cores_" not in open("/proc/self/cgroup").read():  # until it is found
    if time.monotonic() > deadline_s:
        sys.exit(4)
    time.sleep(0.01)
began_s, cpu_s = time.monotonic(), time.process_time()
while time.monotonic() - began_s < 1:
    pass
print((time.process_time() - cpu_s) / (time.monotonic() - began_s))
'''
other = subprocess.Popen(["ray::RelayWorker", "-c", burn, "2"], executable=sys.executable)
subprocess.run(["ray::WorkerDict", "-c", burn, "30"], executable=sys.executable, check=True)
assert other.wait() == 4, "it must have no quota"
sys.exit(3)
"""


@pytest.fixture
def controller(examples) -> Path:
    """Folder of this machine's CPU controller; skips where no cgroup can be made."""
    from limited_cores import CpuLimits, cpu_controller

    try:
        CpuLimits(cpu_controller(), 0.3).close()
    except (OSError, SystemExit) as error:
        pytest.skip(f"cgroups cannot be made here: {error}")
    return cpu_controller()


def test_a_device_has_its_share_of_a_core_and_the_command_its_exit_code(controller):
    before = set(controller.glob("limited_cores_*"))
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "limited_cores.py"), "--cores", "0.3", *command],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    assert float(done.stdout) < 0.4, "of a core; without a quota a quiet machine gives it a whole one"
    assert "1 processes had 0.3 cores each" in done.stderr
    assert set(controller.glob("limited_cores_*")) <= before


def test_a_stopped_script_stops_the_command_and_leaves_no_cgroup(controller):
    script = [sys.executable, str(EXAMPLES / "limited_cores.py"), "--cores", "0.3"]
    forever = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
    with subprocess.Popen([*script, sys.executable, "-c", forever], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        pid = int(running.stdout.readline())
        assert (controller / f"limited_cores_{running.pid}").exists()
        running.terminate()
        assert running.wait(30) == 143
    assert not psutil.pid_exists(pid) and not (controller / f"limited_cores_{running.pid}").exists()
