# SPDX-License-Identifier: Apache-2.0
"""The announcement of what trains next: one entry, which the driver replaces and the trainer's ranks read.

A rank's actor answers no call while it trains. Its threads can read TransferQueue meanwhile.
"""

from __future__ import annotations

from verl_digen.store.client import CLIENT
from verl_digen.store.partitions import UPCOMING

KEY = "next"


async def announce(packed: bytes) -> None:
    """Replace the announcement."""
    import transfer_queue as tq  # starts a client process-wide; kept out of module import

    await tq.async_kv_batch_put(keys=[KEY], partition_id=UPCOMING, tags=[{"packed": packed}])


def announced() -> bytes | None:
    """The newest announcement; None before the first one."""
    import transfer_queue as tq

    entry = CLIENT.run(lambda: tq.kv_list(UPCOMING)).get(UPCOMING, {}).get(KEY)
    return None if entry is None else bytes(entry["packed"])
