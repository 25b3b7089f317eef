# SPDX-License-Identifier: Apache-2.0
"""Sub-group GAP: at a bubble, the scored samples of a group that is not complete yet may train. Pure.

- Only while the trainer has no ready fragment and does not assist, and of one group at a time: the oldest begun one,
  until it is complete or dropped. An assist goes first, because the search that chose it does not know of parts: in
  simulated runs the other order is up to 6 % slower than no parts at all.
- Sample 0 must be scored: the prompt's conditions are published with it.
- A part of n samples takes seconds that its complete group saves later. It is worth its call if
  - the saved seconds are at least `LEAST_USE` of the call's: few samples leave ranks idle, and a call has a fixed part;
  - and more than what the call delays a fragment that is ready before it ends.

Invariants (tests/schedulers/test_parts.py): a part has samples of one open group that are scored and did not train;
no part trains while a fragment is ready. O(open groups + chunks).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf

from verl_digen.schedulers.batch import Batch, Group, LiveChunk, Request
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.search import EPSILON_S
from verl_digen.schedulers.types import TRAINER

CARRIER = 0
"""The sample with which the conditions of a group's prompt are published, which training reads."""
LEAST_USE = 0.5
"""Least share of a part's call that its group saves later."""


def part_to_train(
    now_s: float,
    batch: Batch,
    requests: Collection[Request],
    live: Mapping[int, LiveChunk],
    *,
    durations: Durations,
    rules: BatchRules,
) -> tuple[Group, tuple[int, ...]] | None:
    """The group and the samples of a part that is worth its call now; None if there is none."""
    group = _partial_group(batch)
    if group is None:
        return None
    samples = tuple(sorted(group.rewards.keys() - group.trained))
    train_s = durations.train_s()
    if not samples or train_s is None:
        return None
    saved_s = train_s[1] * len(samples) / rules.group_size
    call_s = durations.part_s(len(samples), rules.group_size)
    assert call_s is not None  # known with `train_s`
    delay_s = max(0.0, call_s - _next_ready_s(now_s, batch, requests, live, durations))
    return (group, samples) if saved_s >= LEAST_USE * call_s and saved_s > delay_s + EPSILON_S else None


def _partial_group(batch: Batch) -> Group | None:
    """The open group of which a part trained, or else the oldest open one that may."""
    scored = [group for group in batch.groups if group.state == "open" and CARRIER in group.rewards]
    return next((group for group in scored if group.trained), scored[0] if scored else None)


def _next_ready_s(
    now_s: float,
    batch: Batch,
    requests: Collection[Request],
    live: Mapping[int, LiveChunk],
    durations: Durations,
) -> float:
    """Seconds until a group all of whose samples are issued is scored; infinite if there is none. An overdue chunk is
    expected now."""
    generating = {request.chunk.id: request for request in requests}

    def scored_in_s(chunk_id: int) -> float:
        request, generated_s = generating.get(chunk_id), live[chunk_id].generated_s
        score_s = durations.score_s() or 0.0
        if request is None or generated_s is not None:
            return max(0.0, (now_s if generated_s is None else generated_s) + score_s - now_s)
        sample_s = 0.0 if request.generator == TRAINER else durations.generate_sample_s(request.generator) or 0.0
        return max(0.0, request.since_s + len(request.chunk.samples) * sample_s - now_s) + score_s

    issued = [group for group in batch.groups if group.state == "open" and not group.unissued]
    return min((max(map(scored_in_s, group.chunks), default=0.0) for group in issued), default=inf)
