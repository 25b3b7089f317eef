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
from verl_digen.schedulers.search import Bubble
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

    Complexity: O(samples and chunks of the batch + slots).
    """
    train_s = durations.train_s()
    score_s = durations.score_s()
    sample_s: dict[str, float] = {}
    for slot in slots:
        measured_s = durations.generate_sample_s(slot)
        if measured_s is None:
            return None
        sample_s[slot] = measured_s
    if train_s is None or score_s is None:
        return None

    free_in_s = dict.fromkeys(slots, 0.0)
    scored_in_s: dict[int, float] = {}
    for request in requests:
        if request.generator != TRAINER:
            end_s = request.since_s + len(request.chunk.samples) * sample_s[request.generator]
            free_in_s[request.generator] = left_s = max(0.0, end_s - now_s)
            scored_in_s[request.chunk.id] = left_s + score_s

    def ready_in_s(chunk_id: int) -> float:
        generated_s = live[chunk_id].generated_s
        return scored_in_s[chunk_id] if generated_s is None else max(0.0, generated_s + score_s - now_s)

    groups_ready_in_s = [0.0] * len(batch.ready)
    stream: list[int] = []
    num_left = rules.num_prompts - batch.num_training - batch.num_trained
    for group in batch.groups:
        if len(groups_ready_in_s) == num_left:
            break
        if group.state == "open":
            stream += [len(groups_ready_in_s)] * len(group.unissued)
            groups_ready_in_s.append(max(map(ready_in_s, group.chunks), default=0.0))

    call_s, group_s = train_s
    assist_chunk_s, assist_sample_s = durations.assist_s() or (0.0, 0.0)
    return Bubble(
        free_in_s=tuple(round(value, TIME_DIGITS) for value in free_in_s.values()),
        sample_s=tuple(sample_s.values()),
        stream=tuple(stream),
        ready_in_s=tuple(round(value, TIME_DIGITS) for value in groups_ready_in_s),
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
    )
