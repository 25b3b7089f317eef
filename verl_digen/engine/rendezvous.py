# SPDX-License-Identifier: Apache-2.0
"""The port where the trainer's ranks meet: outside the range that the kernel hands out.

verl has the kernel hand a port to a task, which frees it; rank 0 listens on it seconds later. A socket that another
process of the start opens in between may get that port, and the run ends with `DistNetworkError ... EADDRINUSE`.
Without room outside that range verl's port stays.
"""

import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from random import SystemRandom
from typing import Any

from verl.single_controller.base.decorator import collect_all_to_all, dispatch_one_to_all

logger = logging.getLogger(__name__)

WINDOWS = (range(20_000, 30_000), range(50_000, 65_536))
"""Ports to choose from. Below the first are Ray's workers' (10002 to 19999), above it Kubernetes'
services (30000 to 32767)."""
NUM_TRIED = 200
"""Most ports that rank 0 tries, one after the other."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel hands out, on Linux."""
MASTER_PORT = "MASTER_PORT"
"""Environment variable of the port, which `torch.distributed` reads."""

_random = SystemRandom()
"""Not the seeded generator: equal runs on one machine would draw equal ports."""


def dispatch(group: Any, *args: Any, **kwargs: Any) -> Any:
    """Dispatch function for verl's `register`: ask rank 0 of a worker group for a port, and pass it to every rank as
    the first argument."""
    return dispatch_one_to_all(group, group.free_port(), *args, **kwargs)


AT_ONE_PORT = {"dispatch_fn": dispatch, "collect_fn": collect_all_to_all}
"""Dispatch mode of a method of all ranks whose first argument is the port."""


def meet_at(port: int | None) -> None:
    """Have this rank meet the others at `port`; None: at verl's."""
    if port is not None:
        os.environ[MASTER_PORT] = str(port)


def free_port() -> int | None:
    """A free port of this machine outside the kernel's ephemeral range; None, with a warning, if there is none."""
    for port in candidate_ports():
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("", port))
            return port
    logger.warning(
        "the ranks meet at verl's port, which another process may take first: none outside the ephemeral range is "
        "free; 32768 to 60999 is usual (sysctl net.ipv4.ip_local_port_range)"
    )
    return None


def candidate_ports() -> list[int]:
    """At most `NUM_TRIED` ports outside the ephemeral range, in a random order; none if that cannot be read."""
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return []
    ports = [port for window in WINDOWS for port in window if not first <= port <= last]
    return _random.sample(ports, min(NUM_TRIED, len(ports)))
