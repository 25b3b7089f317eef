# SPDX-License-Identifier: Apache-2.0
"""Take the port where the ranks of a worker group meet from outside the range that the kernel hands out.

Limitation:  verl's trainers and replicas make a `RayWorkerGroup` without `master_port_range`. Its port is then one that
             the kernel handed out to a task, which frees it; rank 0 listens on it seconds later.
Effect:      without this, a socket that another process of the start opens in between may get that port, and the run
             ends with `DistNetworkError ... EADDRINUSE`.
Affects:     verl ==0.9.*
Remove when: verl gives its worker groups a range; tests/contracts/test_verl_surface.py::
             test_verl_gives_its_worker_groups_no_range_of_ports fails then.

verl tries the ports of a range one after the other, on the node of the group's first bundle. The range is made here, in
the process of the trainer: that node is assumed to have the ephemeral range of this one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from random import SystemRandom
from typing import Any

from packaging.specifiers import SpecifierSet
from verl.single_controller.ray.base import RayWorkerGroup

from verl_digen.patches import is_for

logger = logging.getLogger(__name__)

VERSIONS = SpecifierSet("==0.9.*")
WINDOWS = (range(20_000, 30_000), range(50_000, 65_536))
"""Ports to choose from. Below the first are those of Ray's workers (10002 to 19999), above it those of Kubernetes'
services (30000 to 32767)."""
NUM_TRIED = 200
"""Ports that verl tries for one group."""
MIN_PORTS = 10 * NUM_TRIED
"""Smallest choice: in a smaller one, runs that start together would often try the same ports."""
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""First and last port that the kernel hands out, on Linux."""

_random = SystemRandom()
"""Not the seeded generator: equal runs on one machine would draw equal ports."""

find_address: Callable[..., None] = RayWorkerGroup._get_master_addr_port
"""verl's method at the import of this module."""


def apply() -> None:
    """Replace verl's method with `find_address_outside`, in this process."""
    if is_for(__name__, "verl", VERSIONS):
        RayWorkerGroup._get_master_addr_port = find_address_outside  # type: ignore[method-assign]


def find_address_outside(
    group: RayWorkerGroup, pg: Any, bundle_index: int = 0, master_port_range: list[int] | None = None
) -> None:
    """Have verl find address and port of a group; without a range of its own, in `port_range()`."""
    find_address(group, pg, bundle_index=bundle_index, master_port_range=master_port_range or port_range())


def port_range() -> list[int] | None:
    """First port to try and the end, at a random place outside the ephemeral range; None if there is no room."""
    try:
        first, last = map(int, EPHEMERAL.read_text().split())
    except (OSError, ValueError) as error:
        logger.warning("verl chooses the port of a worker group: the ephemeral range cannot be read (%s)", error)
        return None
    ports = widest_outside(first, last)
    if len(ports) < MIN_PORTS:
        logger.warning(
            "verl chooses the port of a worker group: the ephemeral range %d to %d leaves too few others; 32768 to "
            "60999 is usual (sysctl net.ipv4.ip_local_port_range)",
            first,
            last,
        )
        return None
    start = _random.randrange(ports.start, ports.stop - NUM_TRIED + 1)
    return [start, start + NUM_TRIED]


def widest_outside(first: int, last: int) -> range:
    """The longest run of ports in `WINDOWS` without `first` to `last`."""
    parts = [range(window.start, min(window.stop, first)) for window in WINDOWS]
    parts += [range(max(window.start, last + 1), window.stop) for window in WINDOWS]
    return max(parts, key=len)
