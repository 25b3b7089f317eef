# SPDX-License-Identifier: Apache-2.0
"""Sockets through which a replica's workers receive weight updates: one name per replica of a run, one socket per rank.

verl's address has the number of Ray's job, which is 1 in every run that starts Ray for itself: two such runs on one
machine would meet at one socket, and one of them would wait in vain.
"""

from __future__ import annotations

import ray


def sockets_of(replica_rank: int) -> str:
    """Name of a replica's sockets, for `address`; no other run on this machine has it."""
    run = ray.get_runtime_context()
    return f"digen-weights-{run.get_session_name()}-{run.get_job_id()}-{replica_rank}"


def address(sockets: str, local_rank: int) -> str:
    """Socket that the trainer rank of a worker binds, and to which the worker connects.

    Args:
        sockets: `sockets_of` its replica, at the sender.
        local_rank: the worker's, on its node.
    """
    return f"ipc:///tmp/{sockets}-{local_rank}.sock"
