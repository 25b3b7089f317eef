# SPDX-License-Identifier: Apache-2.0
"""Prompts in the forms that verl's interfaces take: a batch, keyword arguments of custom agent loops, one per column of
verl's data sets, and a DataProto with either, for the classes of verl's RFC."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np
from tensordict import NonTensorData, TensorDict
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

from verl_digen.types import PromptRow

ROW = "row"
"""Column of a batch that holds the `PromptRow`s."""


def batch_columns(row: PromptRow) -> dict[str, Any]:
    """The columns of one prompt in a batch: the row, and columns that verl reads."""
    return {"raw_prompt": row.text, "index": row.index, "uid": row.uid, ROW: row}


def prompt_batch(rows: Sequence[PromptRow]) -> TensorDict:
    """Batch of prompts as verl passes it on."""
    return tu.get_tensordict(collate_fn([batch_columns(row) for row in rows]))


def prompt_rows(batch: TensorDict) -> list[PromptRow]:
    """Inverse of `prompt_batch`."""
    return [item.data if isinstance(item, NonTensorData) else item for item in batch.get(ROW)]


FIELDS = {
    "raw_prompt": "text",
    "negative_prompt": "negative",
    "extra_info": "extra",
    **{name: name for name in ("data_source", "images", "pair", "index", "uid")},
}
"""Column of an agent loop -> field of `PromptRow`; its `ground_truth` lies in the column `reward_model`."""
RFC_FIELDS = {"prompts": "text", **FIELDS, "ground_truth": "ground_truth"}
"""Column of an agent loop or of verl's RFC -> field; of two columns for one field the later one counts."""


def loop_columns(row: PromptRow) -> dict[str, Any]:
    """Keyword arguments of an agent loop for one prompt."""
    columns = {name: getattr(row, field) for name, field in FIELDS.items()}
    return columns | {"reward_model": {"ground_truth": row.ground_truth}}


REQUIRED = ("text", "uid", "data_source", "ground_truth")


def loop_row(columns: Mapping[str, Any]) -> PromptRow:
    """Inverse of `loop_columns`; other columns are ignored. A column `row` is the row itself.

    Also takes the columns of verl's RFC: `prompts` for `raw_prompt`, `ground_truth` for `reward_model`; those with a
    default in `PromptRow` may be missing. ValueError: a required column is missing, or the prompt is no text.
    """
    if ROW in columns:
        return columns[ROW]
    if "reward_model" in columns:
        columns = {**columns, "ground_truth": columns["reward_model"]["ground_truth"]}
    fields = {field: columns[name] for name, field in RFC_FIELDS.items() if name in columns}
    lacking = [field for field in REQUIRED if field not in fields]
    if lacking or not isinstance(fields["text"], str):
        raise ValueError(
            "a prompt must have the columns prompts (or raw_prompt) with its text, uid, data_source, and ground_truth "
            f"(or reward_model), got {', '.join(columns)}; add what is missing, or a column {ROW!r} of PromptRow"
        )
    return PromptRow(**fields)


def dataproto_rows(data: DataProto) -> list[PromptRow]:
    """The prompt of each row of `data`, from its non-tensor columns; see `loop_row`."""
    columns = data.non_tensor_batch
    return [loop_row({name: column[index] for name, column in columns.items()}) for index in range(len(data))]


def sample_indices(rows: Sequence[PromptRow], data: DataProto) -> list[int]:
    """Number of each row in its group: column `sample_index`, or without it its place among the rows of its uid."""
    if "sample_index" in data.non_tensor_batch:
        return [int(index) for index in data.non_tensor_batch["sample_index"]]
    places: dict[str, Iterator[int]] = defaultdict(count)
    return [next(places[row.uid]) for row in rows]


def object_column(values: Sequence[Any]) -> np.ndarray:
    """Non-tensor column of a DataProto with any objects; numpy would make further dimensions of sequences."""
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        column[index] = value
    return column


def is_validation(data: DataProto) -> bool:
    """True for a batch that verl marks as one of a validation."""
    return "validate" in data.meta_info and bool(data.meta_info["validate"])
