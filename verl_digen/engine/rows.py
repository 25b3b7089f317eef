# SPDX-License-Identifier: Apache-2.0
"""Trajectories of samples -> rows -> tiles.

- A row is one (sample, trained step) pair. Rows lie sample after sample, each sample's steps in order; so a
  tile mostly holds rows of one prompt, whose text needs no padding.
- A tile is what one forward/backward takes: `rows_per_tile` rows, the last one what is left.
- Every rank must run as many forwards as the others (FSDP's collectives); one with fewer tiles adds tiles of one
  masked row.

Invariants (tests/engine/test_rows.py)
- Every unmasked row of the samples is in exactly one tile, in order; all other rows of the tiles have mask 0.
- A sample with loss_mask 0 costs no forward, unless its rank has nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_digen.pipeline.conditions import ConditionPair
from verl_digen.types import TRAJECTORY_COLUMNS, Condition, Rows


@dataclass(frozen=True)
class Samples:
    """What a rank trains in one call: B samples, whose numbers of trained steps K may differ."""

    columns: Mapping[str, Sequence[Tensor]]
    """`TRAJECTORY_COLUMNS`, each sample's tensor without a batch dimension."""
    conditions: Sequence[ConditionPair]
    """Samples of one prompt share the object."""
    advantages: Tensor
    """[B] fp32; 0 where the caller only wants log-probs."""
    is_real: Tensor
    """[B] bool; False for a sample that only fills the batch."""
    old_log_probs: Sequence[Tensor] | None
    """B x [K] fp32 of the policy before the update, where the caller computed them."""

    def __len__(self) -> int:
        return len(self.conditions)

    @property
    def num_steps(self) -> list[int]:
        """K of each sample."""
        return [len(positions) for positions in self.columns["positions"]]

    @property
    def trained(self) -> list[int]:
        """Indices of the real samples; of the first one if none is real, because a rank cannot sit a forward out."""
        return self.is_real.nonzero().flatten().tolist() or [0]

    def take(self, indices: Sequence[int]) -> Samples:
        """These samples alone."""
        keep = list(indices)
        return Samples(
            {name: [column[index] for index in keep] for name, column in self.columns.items()},
            [self.conditions[index] for index in keep],
            self.advantages[keep],
            self.is_real[keep],
            None if self.old_log_probs is None else [self.old_log_probs[index] for index in keep],
        )


def read_samples(data: TensorDict) -> Samples:
    """The border with verl: one entry per sample, tensor columns dense or jagged (TransferQueue's are jagged).

    Args:
        data: `TRAJECTORY_COLUMNS`; `uid` per sample; `conditions`, uid -> `ConditionPair`.
            Optional: `advantages` [B] or [B, 1]; `loss_mask` likewise, 0 for padding samples; `old_log_probs` [B, K].

    Raises:
        RuntimeError: a column is missing, or a uid has no conditions.
    """
    missing = [name for name in (*TRAJECTORY_COLUMNS, "uid", "conditions") if name not in data]
    if missing:
        raise RuntimeError(
            f"a training batch needs {', '.join(TRAJECTORY_COLUMNS)}, uid and conditions, but lacks "
            f"{', '.join(missing)}; select these columns when the batch is sent to the trainer"
        )
    uids, conditions = list(tu.get(data, "uid")), tu.get(data, "conditions")
    unknown = sorted({uid for uid in uids if uid not in conditions})
    if unknown:
        raise RuntimeError(f"groups {', '.join(unknown)} have no conditions; their prompts were published incompletely")
    return Samples(
        columns={name: list(data[name].unbind()) for name in TRAJECTORY_COLUMNS},
        conditions=[conditions[uid] for uid in uids],
        advantages=_per_sample(data, "advantages", len(uids), absent=0.0),
        is_real=_per_sample(data, "loss_mask", len(uids), absent=1.0) > 0,
        old_log_probs=[row.float() for row in data["old_log_probs"].unbind()] if "old_log_probs" in data else None,
    )


def _per_sample(data: TensorDict, name: str, num_samples: int, absent: float) -> Tensor:
    if name not in data:
        return torch.full((num_samples,), absent)
    return torch.stack([value.reshape(()) for value in data[name].unbind()]).float()


def make_rows(samples: Samples) -> Rows:
    """All N rows of `samples`, sample after sample.

    Example: two samples with trained steps at positions [0, 1] and [1] of their latents
        # latents      = a0, a1, b1
        # next_latents = a1, a2, b2
    """
    columns, num_steps = samples.columns, samples.num_steps
    starts, ends = [], []
    for latents, positions in zip(columns["latents"], columns["positions"], strict=True):
        starts.append(latents[positions])
        ends.append(latents[positions + 1])
    repeats = torch.tensor(num_steps)

    def per_row(values: Sequence[Condition]) -> list[Condition]:
        return [value for value, count in zip(values, num_steps, strict=True) for _ in range(count)]

    negatives = [negative for _, negative in samples.conditions if negative is not None]
    if negatives and len(negatives) != len(samples):
        raise RuntimeError("some prompts of a batch have negative conditions and some have none; sample all alike")
    return Rows(
        latents=torch.cat(starts),
        next_latents=torch.cat(ends),
        sigmas=torch.cat(list(columns["sigmas"])),
        next_sigmas=torch.cat(list(columns["next_sigmas"])),
        sigma_max=torch.cat([value.reshape(1) for value in columns["sigma_max"]]).repeat_interleave(repeats),
        conditions=per_row([positive for positive, _ in samples.conditions]),
        negative_conditions=per_row(negatives) if negatives else None,
        log_probs=torch.cat(list(columns["log_probs"])),
        advantages=samples.advantages.repeat_interleave(repeats),
        mask=samples.is_real.float().repeat_interleave(repeats),
    )


@dataclass(frozen=True)
class Tile:
    """What one forward/backward takes."""

    rows: Rows
    old_log_probs: Tensor | None
    """[N] fp32; None where the loss takes the forward's own."""


def num_tiles(num_rows: int, rows_per_tile: int) -> int:
    """Tiles that `num_rows` rows need."""
    return -(-num_rows // rows_per_tile)


def split_tiles(rows: Rows, old_log_probs: Tensor | None, rows_per_tile: int, count: int) -> list[Tile]:
    """`rows` and their old log-probs [N] as `count` tiles; those beyond what rows need hold one masked row."""

    def cut(part: slice) -> Tile:
        return Tile(rows[part], None if old_log_probs is None else old_log_probs[part])

    tiles = [cut(slice(start, start + rows_per_tile)) for start in range(0, len(rows), rows_per_tile)]
    first = cut(slice(0, 1))
    filler = replace(first, rows=replace(first.rows, mask=torch.zeros(1)))
    return tiles + [filler] * (count - len(tiles))
