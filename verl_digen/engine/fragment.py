# SPDX-License-Identifier: Apache-2.0
"""A fragment as the driver describes it, in names and numbers: every rank computes the same partition from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_digen.schedulers.deal import Row
from verl_digen.types import Sampling


@dataclass(frozen=True)
class FragmentSample:
    """One sample of a fragment. Written by the driver from the sample's tag, read by every rank."""

    key: str
    """Its key in TransferQueue."""
    uid: str
    """Its group."""
    sample_index: int
    """Its number in the group."""
    reward: float
    num_steps: int
    """K, its points. 0: the reward counts for its group's advantages, and the sample is not trained."""
    sampling: Sampling
    """Settings that it was generated with."""
    condition_key: str
    """Key of its prompt's conditions in TransferQueue."""
    experts: tuple[int, ...] = ()
    """K entries: number of the network that each point runs; () if the model has one."""
    old_log_probs: tuple[float, ...] = ()
    """K entries: log-prob of each trained step before the first of several optimizer steps; () if one is taken."""
    teacher: str = ""
    """Name of its teacher, by its prompt's data source; "" for a loss without teachers."""


@dataclass(frozen=True)
class FragmentSpec:
    """Complete groups that one training call consumes."""

    fragment_id: str
    """Unique within a logical batch."""
    samples: tuple[FragmentSample, ...]
    """Samples, group after group."""


def fragment_rows(samples: Sequence[FragmentSample]) -> list[Row]:
    """All rows of the samples; samples are numbered in order, buckets by expert, and then by sampling and
    teacher. Tiles do not mix buckets, and all ranks run the same buckets in the same order.

    Raises:
        RuntimeError: a sample's number of experts is not its number of points.
    """
    kinds = list(dict.fromkeys((sample.sampling, sample.teacher) for sample in samples))
    rows = []
    for number, sample in enumerate(samples):
        experts = sample.experts or (0,) * sample.num_steps
        if len(experts) != sample.num_steps:
            raise RuntimeError(
                f"sample {sample.key} has {sample.num_steps} trained steps and {len(experts)} experts; "
                "give one expert for each step, or none"
            )
        kind = kinds.index((sample.sampling, sample.teacher))
        rows += [Row(number, point, expert * len(kinds) + kind) for point, expert in enumerate(experts)]
    return rows
