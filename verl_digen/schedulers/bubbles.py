# SPDX-License-Identifier: Apache-2.0
"""Conversion of the planner's state to the `Bubble` that the search takes.

- Surplus groups are left out: the oldest groups that fill the batch are assumed to be the ones that will train.
- A slot whose chunk takes longer than expected is assumed to end now; one that loads weights is assumed free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from verl_digen.schedulers.batch import Batch, LiveChunk, Request
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.search import MAX_STREAM, Bubble
from verl_digen.schedulers.types import TRAINER

TIME_DIGITS = 9
"""Decimals of a second to which times are rounded: clock noise must not make equal bubbles different."""


def bubble_at(
    now_s: float,
    *,
    batch: Batch,
    slots: Collection[str],
    requests: Collection[Request],
    live: Mapping[int, LiveChunk],
    durations: Durations,
    rules: BatchRules,
) -> Bubble | None:
    """The bubble of `batch`; None until generation, scoring and training were each measured.

    Complexity: O(MAX_STREAM + groups of the batch + live chunks + slots).
    """
    train_s, score_s = durations.train_s(), durations.score_s()
    sample_s = {slot: durations.generate_sample_s(slot) for slot in slots}
    known_s = {slot: seconds for slot, seconds in sample_s.items() if seconds is not None}
    if train_s is None or score_s is None or len(known_s) < len(sample_s):
        return None
    free_in_s = dict.fromkeys(slots, 0.0)
    scored_in_s: dict[int, float] = {}
    for request in requests:
        if request.generator != TRAINER:
            end_s = request.since_s + len(request.chunk.samples) * known_s[request.generator]
            free_in_s[request.generator] = left_s = max(0.0, end_s - now_s)
            scored_in_s[request.chunk.id] = left_s + score_s
    for chunk in live.values():
        if chunk.generated_s is not None:
            scored_in_s[chunk.chunk.id] = max(0.0, chunk.generated_s + score_s - now_s)
    stream, ready_in_s, later_groups = _groups_to_come(batch, rules, scored_in_s)
    call_s, group_s = train_s
    assist_chunk_s, assist_sample_s = durations.assist_s() or (0.0, 0.0)
    return Bubble(
        free_in_s=tuple(round(value, TIME_DIGITS) for value in free_in_s.values()),
        sample_s=tuple(known_s.values()),
        stream=stream,
        ready_in_s=tuple(round(value, TIME_DIGITS) for value in ready_in_s),
        chunk_size=rules.slot_chunk_size(len(slots)),
        assist_chunk_size=rules.trainer_chunk_size(len(slots)),
        assist_chunk_s=assist_chunk_s,
        assist_sample_s=assist_sample_s,
        score_s=score_s,
        train_call_s=call_s,
        train_group_s=group_s,
        min_groups=rules.min_groups_per_fragment,
        max_groups=rules.max_groups_per_fragment,
        is_barrier=not rules.is_pipelined,
        later_groups=later_groups,
        later_samples=rules.group_size if later_groups else 0,
    )


def _groups_to_come(
    batch: Batch, rules: BatchRules, scored_in_s: Mapping[int, float]
) -> tuple[tuple[int, ...], list[float], int]:
    """The groups that fill the batch, ready ones first.

    Args:
        scored_in_s: live chunk -> seconds until its samples are scored.

    Returns:
        The group of each sample left to issue; per group, seconds until the samples in flight are scored; and how many
        groups come after these.
    """
    ready_in_s = [0.0] * len(batch.ready)
    stream: list[int] = []
    num_left = rules.num_prompts - batch.num_training - batch.num_trained
    num_later = 0
    for group in batch.groups:
        if len(ready_in_s) + num_later == num_left:
            break
        if group.state != "open":
            continue
        if rules.is_pipelined and len(stream) >= MAX_STREAM and not group.chunks:
            num_later += 1
        else:
            stream += [len(ready_in_s)] * len(group.unissued)
            ready_in_s.append(max((scored_in_s[chunk_id] for chunk_id in group.chunks), default=0.0))
    return tuple(stream), ready_in_s, num_later
