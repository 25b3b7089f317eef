# SPDX-License-Identifier: Apache-2.0
"""Ray's cluster, before the run has joined it: one that runs already, or one that the run makes of this machine."""

from __future__ import annotations

import os

import ray
from ray._private.services import find_bootstrap_address
from ray._private.utils import get_num_cpus


def joins_cluster(address: str | None) -> bool:
    """True if Ray joins a cluster that runs already; else it makes one of this machine.

    Args:
        address: `ray_kwargs.ray_init.address`; RAY_ADDRESS in the environment comes before it.
    """
    if ray.is_initialized():
        return True
    address = os.environ.get("RAY_ADDRESS") or address
    if address in (None, "auto"):
        return find_bootstrap_address(None) is not None
    return address != "local"


def num_machine_cpus() -> int:
    """CPUs of this machine, or of its container, as Ray counts them."""
    return int(get_num_cpus(override_docker_cpu_warning=True))
