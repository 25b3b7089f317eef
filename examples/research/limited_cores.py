# SPDX-License-Identifier: Apache-2.0
"""Run a command with more devices than this machine has cores, each with the same share of a core.

    python examples/research/limited_cores.py --cores 0.45 digen bench --trainer 2 --generator 2

The kernel's CPU quota holds each trainer rank and each replica that the command starts to `--cores`. Without it, a
device that waits leaves its core to the others, and waiting costs nothing. What is no device (the driver, rewards,
TransferQueue) has no limit: leave some cores for it. Where placements alternate on the same devices, a rank and a
replica have a quota each, and never work at the same time.

Linux, as root: a cgroup for each process below the CPU controller of cgroups v1 or v2.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from argparse import REMAINDER, ArgumentParser
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "VERL_DIGEN_LIMITED_CORES"
"""Environment variable of the processes that the command starts; its value is this script's process ID."""
DEVICE = re.compile(r"ray::(WorkerDict|\w*Server)\b")
"""Titles of the processes that Ray gives a device: trainer ranks, and the servers of replicas."""
PERIOD_US = 10_000
"""The kernel stops a process that has used up its quota until this time ends."""
LOOK_S = 0.5
"""Time between two looks for new processes."""
END_S = 30.0
"""Time that limited processes have to end after the command."""


class CpuLimits:
    """A cgroup with a CPU quota for each process.

    Args:
        root: folder of the CPU controller.
        cores: quota, in cores.

    Raises:
        OSError: cgroups cannot be made there.
    """

    def __init__(self, root: Path, cores: float):
        self._folder, self._cores = root / f"limited_cores_{os.getpid()}", cores
        self._is_v2 = (root / "cgroup.controllers").exists()
        if self._is_v2:
            (root / "cgroup.subtree_control").write_text("+cpu")
        self._folder.mkdir()
        if self._is_v2:
            (self._folder / "cgroup.subtree_control").write_text("+cpu")

    def limit(self, pid: int) -> None:
        """Limit a process, with the threads and processes it will start."""
        own, quota = self._folder / str(pid), str(round(self._cores * PERIOD_US))
        own.mkdir(exist_ok=True)
        if self._is_v2:
            (own / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (own / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (own / "cpu.cfs_quota_us").write_text(quota)
        with suppress(ProcessLookupError):  # it has ended
            (own / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the cgroups once their processes have ended.

        Raises:
            OSError: some have not ended within `END_S`.
        """
        deadline_s = time.monotonic() + END_S
        for own in [*(path for path in self._folder.iterdir() if path.is_dir()), self._folder]:
            while True:
                try:
                    own.rmdir()
                    break
                except OSError:
                    if time.monotonic() > deadline_s:
                        raise
                    time.sleep(LOOK_S)


def cpu_controller() -> Path:
    """Folder of the CPU controller.

    Raises:
        SystemExit: there is none.
    """
    root = Path("/sys/fs/cgroup")
    for folder in (root, root / "cpu"):
        controllers = folder / "cgroup.controllers"
        if (controllers.exists() and "cpu" in controllers.read_text().split()) or (folder / "cpu.shares").exists():
            return folder
    raise SystemExit(f"limited_cores.py: needs Linux with the CPU controller of cgroups in {root} or {root}/cpu")


def devices(mark: str) -> Iterator[psutil.Process]:
    """The devices among the processes that the command started."""
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if DEVICE.match(" ".join(process.cmdline())) and process.environ().get(MARK) == mark:
                yield process


def run_limited(command: Sequence[str], limits: CpuLimits) -> tuple[int, int]:
    """Run a command and limit its devices as they appear -> its exit code, and how many there were."""
    mark, found = str(os.getpid()), set()
    running = subprocess.Popen(command, env={**os.environ, MARK: mark})
    try:
        while running.poll() is None:
            for process in devices(mark):
                if process not in found:  # equal ones have equal IDs and starts
                    limits.limit(process.pid)
                    found.add(process)
            time.sleep(LOOK_S)
    finally:
        running.terminate()
        exit_code = running.wait()
    return exit_code, len(found)


def main() -> int:
    parser = ArgumentParser(description="Run a command whose devices are shares of this machine's cores.")
    parser.add_argument("--cores", type=float, required=True, help="cores of a device, such as 0.45")
    parser.add_argument("command", nargs=REMAINDER, help="command, and its arguments")
    args = parser.parse_args()
    if not (0 < args.cores <= 1 and args.command):
        parser.error(f"--cores must be in (0, 1] and a command must follow, got {args.cores} and {args.command}")
    limits = CpuLimits(cpu_controller(), args.cores)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        exit_code, num_devices = run_limited(args.command, limits)
    finally:
        limits.close()
    print(f"{num_devices} processes had {args.cores:g} cores each", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
