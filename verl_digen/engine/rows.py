# SPDX-License-Identifier: Apache-2.0
"""Trajectories of samples -> the rows of a tile.

- A row is one (sample, trained step) pair. `verl_digen.schedulers.tiles` plans the rows of each tile by numbers alone;
  this module gathers their tensors, one tile at a time.
- A filler (padding) tile repeats an existing row, with mask 0.

Invariants (tests/engine/test_rows.py)
- The rows of all tiles of a plan are the rows of the samples, each once; a filler's row has mask 0.
- A sample with loss_mask 0 costs no forward, unless its rank has nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_digen.pipeline.conditions import ConditionPair
from verl_digen.schedulers.tiles import Tile
from verl_digen.types import TRAJECTORY_COLUMNS, Condition, TrainingRows


@dataclass(frozen=True)
class Samples:
    """B samples that a rank trains in one call; their numbers of trained steps K may differ."""

    columns: Mapping[str, Sequence[Tensor]]
    """`TRAJECTORY_COLUMNS`, each sample's tensor without a batch dimension."""
    conditions: Sequence[ConditionPair]
    """Samples of one prompt share the object."""
    advantages: Tensor
    """[B] fp32; 0 if the caller only wants log-probs."""
    is_real: Tensor
    """[B] bool; False for a padding sample."""
    old_log_probs: Sequence[Tensor] | None
    """B x [K] fp32 of the policy before the update, if the caller computed them."""
    rewards: Tensor | None = None
    """[B] fp32, not centred; None if the caller gave none."""

    def __len__(self) -> int:
        return len(self.conditions)

    @property
    def num_steps(self) -> list[int]:
        """K of each sample."""
        return [len(positions) for positions in self.columns["positions"]]

    @property
    def trained(self) -> list[int]:
        """Indices of the real samples; [0] if none is real, because a rank cannot skip a forward."""
        return self.is_real.nonzero().flatten().tolist() or [0]

    def take(self, indices: Sequence[int]) -> Samples:
        """Only these samples."""
        return self.pick([(index, range(self.num_steps[index])) for index in indices])

    def pick(self, picks: Sequence[tuple[int, Sequence[int]]]) -> Samples:
        """Samples by index, each with only these of its trained steps."""
        keep = [index for index, _ in picks]
        steps = [torch.as_tensor(list(chosen), dtype=torch.int64) for _, chosen in picks]

        def per_step(values: Sequence[Tensor]) -> list[Tensor]:
            return [values[index][chosen] for index, chosen in zip(keep, steps, strict=True)]

        return Samples(
            columns={
                name: per_step(column) if name in STEP_COLUMNS else [column[index] for index in keep]
                for name, column in self.columns.items()
            },
            conditions=[self.conditions[index] for index in keep],
            advantages=self.advantages[keep],
            is_real=self.is_real[keep],
            old_log_probs=None if self.old_log_probs is None else per_step(self.old_log_probs),
            rewards=None if self.rewards is None else self.rewards[keep],
        )

    def with_outcomes(self, advantages: Tensor, rewards: Tensor) -> Samples:
        """Copy with these advantages and rewards, [B] fp32 each."""
        return replace(self, advantages=advantages, rewards=rewards)


STEP_COLUMNS = ("positions", "sigmas", "next_sigmas", "log_probs")
"""Trajectory columns with one entry per trained step."""


def read_samples(data: TensorDict) -> Samples:
    """Samples of verl's batch: one entry per sample, tensor columns dense or jagged (TransferQueue's are jagged).

    Args:
        data: `TRAJECTORY_COLUMNS`; `uid` per sample; `conditions`, uid -> `ConditionPair`.
            Optional: `advantages` [B] or [B, 1]; `loss_mask` likewise, 0 for padding samples; `rm_scores` likewise, the
            rewards; `old_log_probs` [B, K].

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
        rewards=_per_sample(data, "rm_scores", len(uids), absent=0.0) if "rm_scores" in data else None,
    )


def _per_sample(data: TensorDict, name: str, num_samples: int, absent: float) -> Tensor:
    if name not in data:
        return torch.full((num_samples,), absent)
    return torch.stack([value.reshape(()) for value in data[name].unbind()]).float()


def make_rows(samples: Samples) -> TrainingRows:
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
    return TrainingRows(
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
        rewards=None if samples.rewards is None else samples.rewards.repeat_interleave(repeats),
    )


def tile_rows(samples: Samples, tile: Tile, places: Mapping[int, int]) -> tuple[TrainingRows, Tensor | None]:
    """The rows of a tile and their old log-probs [N] fp32, None if the samples have none.

    Args:
        places: `Row.sample`, a sample's number in the plan -> its index in `samples`.
    """
    picks = [
        (places[sample], [row.step for row in rows]) for sample, rows in groupby(tile.rows, lambda row: row.sample)
    ]
    picked = samples.pick(picks)
    rows = make_rows(picked)
    if tile.is_filler:
        rows = replace(rows, mask=torch.zeros(len(rows)))
    return rows, None if picked.old_log_probs is None else torch.cat(list(picked.old_log_probs))
