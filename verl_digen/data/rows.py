# SPDX-License-Identifier: Apache-2.0
"""Conversion between verl's batch of prompts and one mapping per prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn


def prompt_rows(batch: TensorDict) -> list[dict[str, Any]]:
    """One mapping per prompt."""

    def column(value: Any) -> Sequence[Any]:
        if isinstance(value, NonTensorStack):
            return [item.data if isinstance(item, NonTensorData) else item for item in value]
        if isinstance(value, NonTensorData):
            return [value.data] * len(batch)
        return list(value)

    columns = {str(name): column(batch.get(name)) for name in batch.keys()}  # noqa: SIM118 - a TensorDict
    return [{name: values[index] for name, values in columns.items()} for index in range(len(batch))]


def prompt_batch(rows: Sequence[Mapping[str, Any]]) -> TensorDict:
    """Inverse of `prompt_rows`."""
    return tu.get_tensordict(collate_fn([dict(row) for row in rows]))
