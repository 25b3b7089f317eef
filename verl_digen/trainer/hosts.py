# SPDX-License-Identifier: Apache-2.0
"""Names of the nodes that processes run on, for lanes of the timeline."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError

logger = logging.getLogger(__name__)


def host_names() -> dict[str, str]:
    """Address -> name of every node that lives."""
    return {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def host_of(server_address: str, names: Mapping[str, str], driver: str) -> str:
    """Name of the node of a server.

    Args:
        server_address: IP:PORT, with an IPv6 address in brackets.
        names: address -> name.
        driver: name of this node, which a server on the loopback address is on.
    """
    address = server_address.rpartition(":")[0].strip("[]")
    if address in names:
        return names[address]
    return driver if address in ("127.0.0.1", "::1", "localhost", "") else address


def told(hosts: Sequence[str]) -> str:
    """One name for a lane on several nodes: `node-1`, or `node-1 and 3 more`."""
    distinct = sorted(set(hosts))
    return distinct[0] if len(distinct) == 1 else f"{distinct[0]} and {len(distinct) - 1} more"


def hosts_of(workers: Sequence[Any], answer_s: float) -> str:
    """Name for the lane of these Ray actors; this node's if they do not answer within `answer_s`."""
    try:
        return told(ray.get([worker.__ray_call__.remote(_host) for worker in workers], timeout=answer_s))
    except RayError as error:
        logger.warning("the trainer's ranks do not say which node they are on (%s); the timeline shows this one", error)
        return socket.gethostname()


def _host(actor: Any) -> str:
    return socket.gethostname()
