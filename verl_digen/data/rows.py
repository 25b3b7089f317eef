# SPDX-License-Identifier: Apache-2.0
"""Prompts in the forms that verl's interfaces take.

| form | for |
| --- | --- |
| a batch, with the row as one column | verl's data loader and agent loop workers |
| keyword arguments, one per column of verl's data sets | `AgentLoopBase.run` of custom agent loops |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import NonTensorData, TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_digen.types import PromptRow

ROW = "row"
"""Column of a batch that holds the `PromptRow`s."""


def batch_columns(row: PromptRow) -> dict[str, Any]:
    """The columns of one prompt in a batch: the row, and those that verl reads."""
    return {"raw_prompt": row.text, "index": row.index, "uid": row.uid, ROW: row}


def prompt_batch(rows: Sequence[PromptRow]) -> TensorDict:
    """Batch of prompts as verl passes it on."""
    return tu.get_tensordict(collate_fn([batch_columns(row) for row in rows]))


def prompt_rows(batch: TensorDict) -> list[PromptRow]:
    """Inverse of `prompt_batch`."""
    return [item.data if isinstance(item, NonTensorData) else item for item in batch.get(ROW)]


def loop_columns(row: PromptRow) -> dict[str, Any]:
    """Keyword arguments of an agent loop for one prompt."""
    return {
        "raw_prompt": row.text,
        "negative_prompt": row.negative,
        "data_source": row.data_source,
        "reward_model": {"ground_truth": row.ground_truth},
        "extra_info": row.extra,
        "images": row.images,
        "pair": row.pair,
        "index": row.index,
        "uid": row.uid,
    }


def loop_row(columns: Mapping[str, Any]) -> PromptRow:
    """Inverse of `loop_columns`; other columns are ignored."""
    return PromptRow(
        text=columns["raw_prompt"],
        negative=columns["negative_prompt"],
        data_source=columns["data_source"],
        ground_truth=columns["reward_model"]["ground_truth"],
        extra=columns["extra_info"],
        images=columns["images"],
        pair=columns["pair"],
        index=columns["index"],
        uid=columns["uid"],
    )
