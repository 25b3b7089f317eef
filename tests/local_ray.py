# SPDX-License-Identifier: Apache-2.0
"""A Ray cluster in this process whose workers start with their imports done, and the server that forks them.

An actor that needs PyTorch and verl is ready after 2 s of a core in place of 6. Ray and verl are imported by each
process: many clusters and jobs, with variables of their own, share one server.
"""

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from filelock import FileLock

from verl_digen.processes.forks import ForkServer, start

# Ray's workers are nice (15) by default: beside other tests on the same cores they would get about 1 % of them.
os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 - the name is Ray's

NUM_STARTS = 5
"""Ray gives its own processes 15 to 30 s to start, numbers in its code; on busy cores they may need longer."""


def ray_starts() -> FileLock:
    """A lock of this machine for who starts Ray: clusters that start together on few cores are all too late, and again
    together when they are started again. Whoever holds it may release it in another thread."""
    return FileLock(Path(tempfile.gettempdir()) / "verl_digen_ray_starts.lock", timeout=1200, thread_local=False)


@cache
def shared_server() -> ForkServer:
    """The server of this process; it forks for `-m MODULE` too."""
    return start({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}, modules=(), with_modules=True)


@contextmanager
def local_ray(*, forks: bool = True, **options: Any) -> Iterator[None]:
    """Start a cluster with these options of `ray.init`, and end it.

    Args:
        forks: False for workers that are started as in a run, with the environment in /proc that they were given.

    Raises:
        Exception: Ray's processes did not start in `NUM_STARTS` times 30 s.
    """
    python = str(shared_server().python) if forks else sys.executable
    if ray.is_initialized():  # Ray connects by itself where code calls it, such as `ray.kill` on a stand-in
        warnings.warn("an earlier test of this process left a connection to Ray", stacklevel=2)
        ray.shutdown()
    _start(NUM_STARTS, python, options)
    try:
        yield
    finally:
        ray.shutdown()


def _start(num_starts: int, python: str, options: dict[str, Any]) -> None:
    try:
        with ray_starts(), mock.patch.object(sys, "executable", python):  # Ray starts workers with it
            ray.init(include_dashboard=False, log_to_driver=False, **options)
    except Exception as failed:
        if "timed out during startup" not in str(failed) or num_starts == 1:
            raise
        ray.shutdown()
        _start(num_starts - 1, python, options)
