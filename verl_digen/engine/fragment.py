# SPDX-License-Identifier: Apache-2.0
"""A fragment as the driver describes it, in names and numbers: every rank computes the same partition from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from verl_digen.schedulers.tiles import Row
from verl_digen.types import SampleFacts, Sampling
from verl_digen.types.settings import Turn


@dataclass(frozen=True)
class FragmentSample:
    """One sample of a fragment. Written by the driver from the sample's tag, read by every rank."""

    key: str
    """Its key in TransferQueue."""
    facts: SampleFacts
    reward: float
    old_log_probs: tuple[float, ...] = ()
    """K entries: log-prob of each trained step before the first of several optimizer steps, nan at points that do not
    train; () if one is taken."""
    skipped: frozenset[int] = frozenset()
    """Points that do not train, because another sample of the group trains the same step, or it was not chosen; its
    reward counts for its group's advantages whether or not any point trains."""
    turns: tuple[Turn, ...] = ()
    """Turns of the episode that it is, whose points follow each other; () without an environment."""

    @property
    def points(self) -> tuple[int, ...]:
        """Points that train, one row each."""
        return tuple(point for point in range(self.facts.num_steps) if point not in self.skipped)

    @property
    def num_rows(self) -> int:
        return self.facts.num_steps - len(self.skipped)

    def turn_of(self, point: int) -> int:
        """Number of the turn that a point is of; 0 without an environment."""
        ends = accumulate(turn.num_steps for turn in self.turns)
        return next((number for number, end in enumerate(ends) if point < end), 0)

    def generated_with(self, point: int) -> SampleFacts | Turn:
        """Holder of the point's settings and conditions: its turn, or without an environment the sample's facts."""
        return self.turns[self.turn_of(point)] if self.turns else self.facts


@dataclass(frozen=True)
class FragmentSpec:
    """Complete groups that one training call consumes."""

    fragment_id: str
    """Unique within a logical batch."""
    samples: tuple[FragmentSample, ...]
    """Samples, group after group."""


def fragment_rows(samples: Sequence[FragmentSample]) -> list[Row]:
    """All rows of the samples; samples are numbered in order, buckets by expert, and then by sampling. Tiles do not mix
    buckets, and all ranks run the same buckets in the same order. RuntimeError if a sample has not one expert for each
    point, or none."""
    kinds: dict[Sampling, int] = {}
    for sample in samples:
        for sampling in (turn.sampling for turn in sample.turns) if sample.turns else (sample.facts.sampling,):
            kinds.setdefault(sampling, len(kinds))
    rows = []
    for number, sample in enumerate(samples):
        num_steps = sample.facts.num_steps
        experts = sample.facts.experts or (0,) * num_steps
        if len(experts) != num_steps:
            raise RuntimeError(
                f"sample {sample.key} has {num_steps} trained steps and {len(experts)} experts; "
                "give one expert for each step, or none"
            )
        for point in sample.points:
            rows.append(Row(number, point, experts[point] * len(kinds) + kinds[sample.generated_with(point).sampling]))
    return rows
