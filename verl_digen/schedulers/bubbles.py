# SPDX-License-Identifier: Apache-2.0
"""Conversion of the planner's state to the `Bubble` that the search takes.

- Surplus groups are left out: the oldest groups that fill the batch are assumed to be the ones that will train.
- A slot whose chunk takes longer than expected is assumed to end now; one that loads weights is assumed free.
- Of a large remainder, slots that are free at about the same time make a bundle, which takes the chunks of all of them
  at once, and larger ones where there are few slots. With bundles the makespan differs from single slots' by a few per
  cent (tests/schedulers/test_search.py).
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

from verl_digen.schedulers.batch import Batch, ChunkRequest, LiveChunk
from verl_digen.schedulers.durations import Durations
from verl_digen.schedulers.play import Bubble
from verl_digen.schedulers.rules import BatchRules
from verl_digen.schedulers.types import TRAINER, TrainerWaitReason

MAX_STREAM = 256
"""Most chunks of bundles that the search plays: a decision takes a few ms of Python."""

TIME_DIGITS = 9
"""Decimals of a second to which times are rounded: clock noise must not make equal bubbles different."""


def bubble_at(
    now_s: float,
    batch: Batch,
    slots: Collection[str],
    requests: Collection[ChunkRequest],
    live: Mapping[int, LiveChunk],
    durations: Durations,
    rules: BatchRules,
) -> Bubble | None:
    """The bubble of `batch`; None until generation, scoring and training were each measured.

    Complexity: O(groups of the batch + live chunks + slots log slots).
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
    unissued, ready_in_s = _groups_to_come(batch, rules, scored_in_s)
    call_s, group_s = train_s
    assist_call_s, assist_round_s = durations.assist_s() or (0.0, 0.0)
    chunk_size = rules.slot_chunk_size(len(slots))
    bundle = max(1, min(len(slots), -(-sum(unissued) // (chunk_size * MAX_STREAM))))
    chunk_size = max(chunk_size, -(-sum(unissued) // (bundle * MAX_STREAM)))
    free_s, speed_s = bundles([(free_in_s[slot], known_s[slot]) for slot in slots], bundle)
    return Bubble(
        free_in_s=tuple(round(value, TIME_DIGITS) for value in free_s),
        sample_s=tuple(speed_s),
        unissued=tuple(unissued),
        ready_in_s=tuple(round(value, TIME_DIGITS) for value in ready_in_s),
        chunk_size=chunk_size,
        assist_sizes=rules.assist_sizes(len(slots)),
        assist_call_s=assist_call_s,
        assist_round_s=assist_round_s,
        score_s=score_s,
        train_call_s=call_s,
        train_group_s=group_s,
        max_groups=rules.largest_fragment,
        num_ranks=rules.num_trainer_ranks,
        is_barrier=not rules.gap.enable,
        spans_groups=rules.assist_spans_groups,
        bundle=bundle,
    )


def bundles(slots: Sequence[tuple[float, float]], size: int) -> tuple[list[float], list[float]]:
    """Bundles of `size` slots that are free at about the same time -> when each is free, and its seconds per sample.
    `slots`: [S] (seconds until it is free, seconds of a sample). Left-over slots are shared out: all bundles are a
    little faster instead.

    Example:
        bundles([(0.0, 2.0), (3.0, 2.0), (1.0, 2.0), (2.0, 2.0)], 2)   # [0.5, 2.5], [2.0, 2.0]
    """
    if size == 1:
        return [free for free, _ in slots], [seconds for _, seconds in slots]
    ordered = sorted(slots)
    number = len(ordered) // size
    cuts = [index * len(ordered) // number for index in range(number + 1)]
    parts = [ordered[first:last] for first, last in pairwise(cuts)]
    free_s = [sum(free for free, _ in part) / len(part) for part in parts]
    return free_s, [size / sum(1 / seconds for _, seconds in part) for part in parts]


def _groups_to_come(batch: Batch, rules: BatchRules, scored_in_s: Mapping[int, float]) -> tuple[list[int], list[float]]:
    """The groups that fill the batch, ready ones first: per group, the number of samples left to issue, and seconds
    until the samples in flight are scored. `scored_in_s`: live chunk -> seconds until its samples are scored."""
    ready_in_s = [0.0] * len(batch.ready)
    unissued = [0] * len(batch.ready)
    num_left = rules.num_prompts - batch.num_training - batch.num_trained
    for group in batch.groups:
        if len(ready_in_s) == num_left:
            break
        if group.state == "open":
            unissued.append(len(group.unissued))
            ready_in_s.append(max((scored_in_s[chunk_id] for chunk_id in group.chunks), default=0.0))
    return unissued, ready_in_s


def idle_reason(batch: Batch, *, has_slots: bool, has_unissued: bool) -> TrainerWaitReason:
    """Reason why a free trainer waits that may not assist.

    `has_slots`: some slot generates; `has_unissued`: samples of the batch are left to issue.
    """
    if batch.num_open == 0:
        return "prompts"
    if not has_slots:
        return "no_slots"
    return "no_fragment_ready" if batch.num_requests or has_unissued else "scoring"
