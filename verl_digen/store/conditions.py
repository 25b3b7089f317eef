# SPDX-License-Identifier: Apache-2.0
"""Prompt conditions in TransferQueue: one row per content, not one per sample.

The key is a hash of what was encoded (`SampleRequest.condition_key`), so that groups with equal texts share a row;
conditions that a group has for itself begin with its uid (`store.keys.own_condition_key`).
"""

from collections.abc import Collection, Sequence

import transfer_queue as tq
from torch import Tensor

from verl_digen.store.client import StoredRow, fetch_columns, put
from verl_digen.store.keys import CONDITIONS, own_condition_key
from verl_digen.types import Condition

ConditionPair = tuple[Condition, Condition | None]
"""(positive, negative or None without guidance) of one prompt."""


def to_columns(positive: Condition, negative: Condition | None) -> dict[str, Tensor]:
    """Columns `positive.NAME` and, with guidance, `negative.NAME` of one prompt's conditions."""
    columns = {f"positive.{name}": tensor for name, tensor in positive.items()}
    if negative is not None:
        columns |= {f"negative.{name}": tensor for name, tensor in negative.items()}
    return columns


def from_columns(columns: dict[str, Tensor]) -> ConditionPair:
    """Inverse of `to_columns`."""
    branches: dict[str, Condition] = {"positive": {}, "negative": {}}
    for column, tensor in columns.items():
        branch, _, name = column.partition(".")
        branches[branch][name] = tensor
    return branches["positive"], branches["negative"] or None


async def put_condition(key: str, positive: Condition, negative: Condition | None) -> None:
    """Store one prompt's conditions. Idempotent: the key stands for the content."""
    await put(CONDITIONS, {key: StoredRow({}, to_columns(positive, negative))})


def own_condition_keys(uids: Collection[str]) -> frozenset[str]:
    """Keys of the conditions that these groups have for themselves and that are stored. Lists the partition."""
    if not uids:
        return frozenset()
    starts = tuple(own_condition_key(uid, "") for uid in uids)
    return frozenset(key for key in tq.kv_list(CONDITIONS).get(CONDITIONS, {}) if key.startswith(starts))


def fetch_conditions(keys: Sequence[str]) -> dict[str, ConditionPair]:
    """Fetch the conditions of each distinct key. RuntimeError: one has none, so its group was published
    incompletely."""
    distinct = list(dict.fromkeys(keys))
    columns = fetch_columns(CONDITIONS, distinct)
    return {
        key: from_columns({name: tensors[index] for name, tensors in columns.items()})
        for index, key in enumerate(distinct)
    }
