# SPDX-License-Identifier: Apache-2.0
"""Training rows as a TensorDict of batch size [N]: what verl's methods take and split.

| column | shape | rows |
| --- | --- | --- |
| `latents` | [N, ...] what the network reads | all |
| `sigmas`, `advantages` | [N] fp32 | all |
| `mask` | [N] fp32: 1 trains, 0 is padding | all |
| `rewards` | [N] fp32, if an objective reads them | all |
| `conditions`, `negative_conditions` | list of N `Condition`; negative ones with guidance only | all |
| `sampling` | list of N `Sampling` | all |
| `next_latents` | [N, ...] | path points |
| `next_sigmas`, `sigma_max`, `log_probs` | [N] fp32 | path points |
| `old_log_probs` | [N] fp32, before the first of several optimizer steps | path points, if given |
| `clean`, `noise` | [N, ...] fp32 | forward points |

Columns have the names and meanings of the fields of `TrainingRows`, `Transitions` and `Noised`. Lists are a
`NonTensorStack` of one object per row, so that verl's `tensordict_utils`, `chunk`, `to` and `torch.cat` keep rows
whole. Further columns are allowed, for a caller's loss function.

Invariant (tests/engine/test_verl_batches.py): rows that were packed, split, joined and unpacked are the same.
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_digen.types import SCHEDULE_COLUMNS, Noised, TrainingRows, Transitions

OPTIONAL = ("negative_conditions",)
"""Columns that may be absent, besides fields with a default."""


def pack_rows(rows: TrainingRows) -> TensorDict:
    """The rows as a TensorDict; it shares their tensors."""
    parts = {**vars(rows), **vars(rows.point), "sampling": [rows.sampling] * len(rows)}
    columns = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
    lists = {name: list(parts[name]) for name in ("conditions", "negative_conditions", "sampling") if parts[name]}
    return tu.get_tensordict(columns | lists)


def unpack_rows(batch: TensorDict) -> TrainingRows:
    """The rows of a TensorDict, with the schedule on the host.

    Raises:
        ValueError: a column is missing, or the rows have several samplings.
    """
    kind = Noised if "clean" in batch else Transitions
    columns = _columns(batch, TrainingRows, besides=("point",))
    samplings = {*columns["sampling"]}
    if len(samplings) != 1:
        raise ValueError(f"rows of one micro-batch must have one sampling, got {samplings}; split the batch by them")
    columns["sampling"] = samplings.pop()
    columns.setdefault("negative_conditions", None)
    return TrainingRows(**columns, point=kind(**_columns(batch, kind)))


def _columns(batch: TensorDict, kind: type, besides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Columns of the fields of `kind` that the batch has."""
    wanted = [field for field in fields(kind) if field.name not in besides]
    missing = [
        field.name
        for field in wanted
        if field.name not in batch and field.default is MISSING and field.name not in OPTIONAL
    ]
    if missing:
        raise ValueError(
            f"a batch of rows needs the columns {', '.join(missing)} for {kind.__name__}, got "
            f"{', '.join(map(str, batch.keys()))}; see verl_digen.engine.row_batch"
        )
    found = {field.name: tu.get(batch, field.name) for field in wanted if field.name in batch}
    return {name: value.cpu() if name in SCHEDULE_COLUMNS else value for name, value in found.items()}
