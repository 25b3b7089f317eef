# SPDX-License-Identifier: Apache-2.0
"""TransferQueue's client of this process, for several threads, and TransferQueue's processes.

- TransferQueue makes the client in a process's first call, and other threads see it before it can be used: a second
  call meanwhile fails with "Storage manager not initialized". So the first call of a process runs alone.
- Its client waits for the controller forever, and ten minutes for a storage unit, so one that died or hangs would stop
  every process that calls it. The driver asks for heartbeats (`verl_digen.processes.supervision`) and cancels its own
  calls here.

Invariant (tests/store/test_client.py): no call begins before the first one has ended; later ones run side by side.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import ray
import ray.util
import transfer_queue as tq
from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_digen.processes.bundles import Bundles

_MAKING, _MADE = threading.Lock(), threading.Event()
"""Held by the threads' calls until one has succeeded; then the event is set."""


def fetch_columns(partition: str, keys: Sequence[str], names: Sequence[str] | None = None) -> dict[str, list[Tensor]]:
    """Fetch columns of rows, in order, from any thread; None: all columns. RuntimeError: a row is not there."""
    with nullcontext() if _MADE.is_set() else _MAKING:
        found = tq.kv_batch_get(
            keys=list(keys), partition_id=partition, select_fields=None if names is None else [*names]
        )
        _MADE.set()
    if len(found) != len(keys):
        raise RuntimeError(f"{len(keys)} rows of {partition} are to be trained, but TransferQueue has {len(found)}")
    return {str(name): list(found.get(name).unbind()) for name in found.keys()}  # noqa: SIM118 - a TensorDict


class StoredRow(NamedTuple):
    """Tag and columns under one key."""

    tag: Mapping[str, Any]
    columns: Mapping[str, Tensor] | None = None
    """None leaves what is there."""


Rows = tuple[str, Mapping[str, StoredRow]]
"""(partition, key -> row); of one put all rows have columns, of the same names, or none has."""


def _like(rows: Rows) -> Any:
    """Partition, and shape and dtype of each column, that the rows of one put share."""
    partition, by_key = rows
    columns = next(iter(by_key.values())).columns
    return partition, None if columns is None else tuple((name, one.shape, one.dtype) for name, one in columns.items())


async def _put_all(given: Sequence[Rows]) -> list[None]:
    rows = {key: row for _, by_key in given for key, row in by_key.items()}
    columns = [dict(row.columns) for row in rows.values() if row.columns is not None]
    await tq.async_kv_batch_put(
        keys=list(rows),
        partition_id=given[0][0],
        fields=list_of_dict_to_tensordict(columns) if columns else None,
        tags=[dict(row.tag) for row in rows.values()],
    )
    return [None] * len(given)


_PUTS: WeakKeyDictionary[asyncio.AbstractEventLoop, Bundles[Rows]] = WeakKeyDictionary()


async def put(partition: str, rows: Mapping[str, StoredRow]) -> None:
    """Store rows by key. A put takes four round trips, whatever is in it: those that this process's event loop begins
    in one pass are one, which fails for all of them."""
    await _PUTS.setdefault(asyncio.get_running_loop(), Bundles(_put_all, key=_like)).call((partition, rows))


def start(config: Any) -> None:
    """Start TransferQueue; `config` is verl's section `transfer_queue`."""
    tq.init(config)


def close() -> None:
    """End TransferQueue's processes."""
    tq.close()


def processes() -> dict[str, Any]:
    """TransferQueue's controller and storage units by name; the units are in the namespace of the run."""
    units = [name for name in ray.util.list_named_actors() if name.startswith("TransferQueueStorageUnit#")]
    named = {f"TransferQueue's storage unit {name.partition('#')[2]}": ray.get_actor(name) for name in units}
    controller = ray.get_actor("TransferQueueController", namespace="transfer_queue")
    return {"TransferQueue's controller": controller, **named}


def cancel_calls() -> None:
    """Fail this process's blocking calls in flight with `concurrent.futures.CancelledError`, and no later ones."""
    loop: asyncio.AbstractEventLoop = tq.get_client()._loop

    def cancel_all() -> None:
        for task in asyncio.all_tasks(loop):
            task.cancel()

    loop.call_soon_threadsafe(cancel_all)
