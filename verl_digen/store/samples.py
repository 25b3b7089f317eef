# SPDX-License-Identifier: Apache-2.0
"""Samples in TransferQueue: a trajectory's columns, its reward and its tag, under `SampleName.key`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from verl_digen.store.partitions import TRAIN
from verl_digen.types import TRAJECTORY_COLUMNS, Trajectory

if TYPE_CHECKING:
    from transfer_queue import KVBatchMeta

SampleTags = dict[str, Mapping[str, Any]]
"""Key -> tag."""


async def put_samples(samples: Mapping[str, tuple[Trajectory, Mapping[str, Any]]]) -> None:
    """Store samples for the trainer's ranks; `samples`: key -> trajectory and tag."""
    import transfer_queue as tq  # starts a client process-wide; kept out of module import

    rows = [
        {
            **trajectory.columns(),
            "uid": trajectory.uid,
            "rm_scores": torch.tensor([tag["reward"]], dtype=torch.float32),
        }
        for trajectory, tag in samples.values()
    ]
    await tq.async_kv_batch_put(
        keys=list(samples),
        partition_id=TRAIN,
        fields=list_of_dict_to_tensordict(rows),
        tags=[dict(tag) for _, tag in samples.values()],
    )


async def put_tags(partition: str, tags: SampleTags) -> None:
    """Store the tags of samples that are not trained."""
    import transfer_queue as tq

    await tq.async_kv_batch_put(keys=list(tags), partition_id=partition, tags=[dict(tag) for tag in tags.values()])


def fetch_columns(partition: str, keys: Sequence[str]) -> dict[str, list[Tensor]]:
    """Fetch `TRAJECTORY_COLUMNS` of samples, in order.

    Raises:
        RuntimeError: a sample is not there.
    """
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=list(keys), partition_id=partition, select_fields=list(TRAJECTORY_COLUMNS))
    if len(data) != len(keys):
        raise RuntimeError(f"{len(keys)} samples are to be trained, but TransferQueue has {len(data)} of them")
    return {name: list(data.get(name).unbind()) for name in TRAJECTORY_COLUMNS}


def clear(partition: str, keys: Sequence[str]) -> None:
    """Remove entries; unknown keys are ignored."""
    import transfer_queue as tq

    tq.kv_clear(keys=list(keys), partition_id=partition)


def is_sample(tag: Mapping[str, Any]) -> bool:
    """Tell a sample's tag from a prompt's status."""
    return "reward" in tag


def batch_meta(partition: str, tags: SampleTags) -> KVBatchMeta:
    """Describe stored samples as verl's loop takes them."""
    from transfer_queue import KVBatchMeta

    return KVBatchMeta(partition_id=partition, keys=list(tags), tags=[dict(tag) for tag in tags.values()])
