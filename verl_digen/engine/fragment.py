# SPDX-License-Identifier: Apache-2.0
"""A fragment as the driver describes it, and how a rank fetches the samples of its rows.

Only names and numbers pass through the driver. Every rank computes the same partition from them, and fetches the
tensors of its own rows from TransferQueue: samples by key, conditions by prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from verl_digen.engine.rows import Samples
from verl_digen.schedulers.deal import Row
from verl_digen.store.conditions import fetch_conditions
from verl_digen.store.samples import fetch_columns
from verl_digen.types import Sampling


@dataclass(frozen=True)
class FragmentSample:
    """One sample of a fragment. Written by the driver from the sample's tag, read by every rank."""

    key: str
    """Its key in TransferQueue."""
    uid: str
    """Its group."""
    reward: float
    num_steps: int
    """K. 0: the reward counts for its group's advantages, and the sample is not trained."""
    experts: tuple[int, ...] = ()
    """K entries: number of the network that each trained step runs; () if the model has one."""
    sampling: Sampling | None = None
    """Settings that it was generated with; None: those of the run."""
    condition_key: str = ""
    """Key of its prompt's conditions in TransferQueue."""
    old_log_probs: tuple[float, ...] = ()
    """K entries: log-prob of each trained step before the first of several optimizer steps; () if one is taken."""


@dataclass(frozen=True)
class FragmentSpec:
    """Complete groups that one training call consumes.

    Example:
        FragmentSpec("f0", tuple(FragmentSample(f"p7_{i}_0", "p7", rewards[i], num_steps=9) for i in range(24)))
    """

    fragment_id: str
    """Unique within a logical batch."""
    samples: tuple[FragmentSample, ...]
    """Samples, group after group."""


Fetch = Callable[[Sequence[FragmentSample]], Samples]
"""Loads the tensors of samples, in order. Each rank calls it for the samples whose rows it has."""


def fragment_rows(samples: Sequence[FragmentSample]) -> list[Row]:
    """All rows of the samples; samples are numbered in order.

    Raises:
        RuntimeError: a sample's number of experts is not its number of steps.
    """
    rows = []
    for number, sample in enumerate(samples):
        experts = sample.experts or (0,) * sample.num_steps
        if len(experts) != sample.num_steps:
            raise RuntimeError(
                f"sample {sample.key} has {sample.num_steps} trained steps and {len(experts)} experts; "
                "give one expert for each step, or none"
            )
        rows += [Row(number, step, expert) for step, expert in enumerate(experts)]
    return rows


def fetch_samples(partition: str, samples: Sequence[FragmentSample]) -> Samples:
    """The samples from TransferQueue's `partition`, with the conditions of their prompts."""
    columns = fetch_columns(partition, [sample.key for sample in samples])
    conditions = fetch_conditions([sample.condition_key for sample in samples])
    return Samples(
        columns=columns,
        conditions=[conditions[sample.condition_key] for sample in samples],
        advantages=torch.zeros(len(samples)),
        old_log_probs=None,
    )
