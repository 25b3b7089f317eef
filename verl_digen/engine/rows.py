# SPDX-License-Identifier: Apache-2.0
"""Trajectories of samples -> the rows of a tile.

- A row is one (sample, trained step) pair. `verl_digen.schedulers.tiles` plans the rows of each tile by numbers alone;
  this module gathers their tensors, one tile at a time.
- A filler (padding) tile repeats an existing row, with mask 0.

Invariants (tests/engine/test_rows.py)
- The rows of all tiles of a plan are the rows of the samples, each once; a filler's row has mask 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from verl_digen.schedulers.tiles import Tile
from verl_digen.store.conditions import ConditionPair
from verl_digen.types import Condition, TrainingRows


@dataclass(frozen=True)
class Samples:
    """B samples that a rank trains in one call; their numbers of trained steps K may differ."""

    columns: Mapping[str, Sequence[Tensor]]
    """`TRAJECTORY_COLUMNS`, each sample's tensor without a batch dimension."""
    conditions: Sequence[ConditionPair]
    """Samples of one prompt share the object."""
    advantages: Tensor
    """[B] fp32; 0 if the caller only wants log-probs."""
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
            old_log_probs=None if self.old_log_probs is None else per_step(self.old_log_probs),
            rewards=None if self.rewards is None else self.rewards[keep],
        )

    def with_outcomes(
        self, advantages: Tensor, rewards: Tensor, old_log_probs: Sequence[Tensor] | None = None
    ) -> Samples:
        """Copy with these advantages and rewards, [B] fp32 each, and old log-probs, B x [K] fp32."""
        return replace(self, advantages=advantages, rewards=rewards, old_log_probs=old_log_probs)


STEP_COLUMNS = ("positions", "sigmas", "next_sigmas", "log_probs")
"""Trajectory columns with one entry per trained step."""


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
        mask=torch.ones(sum(num_steps)),
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
