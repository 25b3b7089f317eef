# SPDX-License-Identifier: Apache-2.0
"""Samples in TransferQueue: the columns of a trajectory's record, and its tag, under `SampleName.key`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_digen.store.client import CLIENT
from verl_digen.store.keys import TRAIN
from verl_digen.store.tags import from_entry, to_entry
from verl_digen.types import SampleTag, Trajectory

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta


async def put_samples(samples: Mapping[str, tuple[Trajectory, SampleTag]], step: int) -> None:
    """Store samples for the trainer's ranks.

    Args:
        samples: key -> trajectory and tag.
        step: the optimizer step that they are for.
    """
    import transfer_queue as tq  # starts a client process-wide; kept out of module import

    rows = [trajectory.record.columns() for trajectory, _ in samples.values()]
    await tq.async_kv_batch_put(
        keys=list(samples),
        partition_id=TRAIN,
        fields=list_of_dict_to_tensordict(rows),
        tags=[to_entry(tag, step) for _, tag in samples.values()],
    )


async def put_tags(partition: str, tags: Mapping[str, SampleTag], step: int) -> None:
    """Store the tags of samples that are not trained; `step` is the number of optimizer steps taken."""
    import transfer_queue as tq

    await tq.async_kv_batch_put(
        keys=list(tags), partition_id=partition, tags=[to_entry(tag, step) for tag in tags.values()]
    )


def fetch_columns(partition: str, keys: Sequence[str], names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Fetch columns of samples, in order.

    Args:
        names: `PathRecord.COLUMNS` or `CleanRecord.COLUMNS`.

    Raises:
        RuntimeError: a sample is not there.
    """
    import transfer_queue as tq

    data = CLIENT.run(lambda: tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(names)))
    if len(data) != len(keys):
        raise RuntimeError(f"{len(keys)} samples are to be trained, but TransferQueue has {len(data)} of them")
    return {name: list(data.get(name).unbind()) for name in names}


def clear(partition: str, keys: Sequence[str]) -> None:
    """Remove entries; unknown keys are ignored."""
    import transfer_queue as tq

    tq.kv_clear(keys=list(keys), partition_id=partition)


def to_batch(partition: str, tags: Mapping[str, SampleTag], step: int) -> KVBatchMeta:
    """Describe stored samples as verl's loop takes them; `tags`: key -> tag."""
    from transfer_queue import KVBatchMeta

    entries = [to_entry(tag, step) for tag in tags.values()]
    return KVBatchMeta(partition_id=partition, keys=list(tags), tags=entries)


def from_batch(batch: KVBatchMeta) -> dict[str, SampleTag]:
    """Key -> tag of the samples that verl's replay buffer gives out."""
    return {key: from_entry(entry) for key, entry in zip(batch.keys, batch.tags, strict=True)}
