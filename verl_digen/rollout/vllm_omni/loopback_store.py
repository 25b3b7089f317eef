# SPDX-License-Identifier: Apache-2.0
"""Rendezvous store of a replica's engine workers (all on one node), on loopback so that other machines cannot reach it.

vLLM-Omni's default is a PyTorch store that listens on all interfaces without authentication.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc

HOST = "127.0.0.1"
TIMEOUT = timedelta(minutes=30)
"""Timeout for another worker, which may have to load its part of the model first."""


def loopback_store(port: int, *, rank: int, num_workers: int) -> Store:
    """The store of worker `rank`; a single worker needs no port."""
    if num_workers == 1:
        return HashStore()
    if rank != 0:
        return TCPStore(HOST, port, num_workers, is_master=False, timeout=TIMEOUT)
    listener = socket.create_server((HOST, port))
    return TCPStore(
        HOST,
        port,
        num_workers,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
