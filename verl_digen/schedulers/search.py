# SPDX-License-Identifier: Apache-2.0
"""Bubble-triggered search: at a bubble, should the trainer wait or generate a chunk itself?

A bubble is a moment at which the trainer has no ready fragment while the batch is incomplete. The search plays the rest
of the batch forward on a makespan model and returns the choice that ends it first.

- Model: slots take the next chunk of the sample stream as soon as they are free; a group is ready `score_s` after its
  last chunk; the trainer trains ready groups at once, oldest readiness first, and assists only at bubbles.
- A trainer that waits does so until the next fragment is ready: an assist that starts later, with nothing trained in
  between, generates the same kind of chunk and ends later, so it is never better.
- Branching is exact for the first choices and heuristic after: the value of a leaf is the best of "never assist again",
  "assist at the next k bubbles" for every k, and "assist where no fragment is delayed" for every k.
- Of a large remainder `MAX_STREAM` samples are played; when later groups are ready, `schedulers.later` calculates.
- Iterative deepening until `MAX_WORK` simulated chunks are used up: a small remainder of a batch is searched
  exhaustively, a large one hardly beyond the heuristic plans.
- The plan found is kept, and competes with the plans that the next search finds.

Invariants
- Under the model, the plan followed is never longer than waiting at every bubble.
- An assist is chosen only where it shortens the model's makespan by more than `EPSILON_S`.
- Equal input gives equal output: the budget counts work, not time.

Complexity of a decision, with U unissued chunks, M later groups and S slots: O(MAX_WORK) simulated chunks, plus
O((U + M) * STOPS_TRIED) for the leaf at the root; a chunk costs O(log S), a choice O(S).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import Literal

from verl_digen.schedulers.later import later_ready_s

EPSILON_S = 1e-7
"""Times closer than this are the same moment: the order of a sum changes its rounding."""

MAX_WORK = 4_000
"""Simulated chunks in one decision before the search stops deepening; a few ms of Python."""

MAX_STREAM = 768
"""Unissued samples, rounded up to whole groups, that are played chunk by chunk."""

SLOTS_PER_PLAY = 16
"""Number of slots whose state is copied in about the time of simulating one chunk."""

MAX_DEPTH = 64
"""Maximum number of choices ahead, even if work is left."""

MAX_ANSWERS = 4_096
"""Maximum number of cached bubbles; when it is reached, the cache is cleared."""

STOPS_TRIED = (4, 16)
"""(min, max) number of stopping points simulated per path before refining around the best. In between, limited by
MAX_WORK / 2."""

PATH_CHOICES = 128
"""Maximum length of a path, in choices; a search at the next bubble reaches one choice further."""

Choice = Literal["wait", "assist"]


@dataclass(frozen=True)
class Bubble:
    """State of the trainer's batch at a bubble; times are seconds from now.

    Example, two slots that become free in 1 s, two fragments of one sample unissued, two in flight:
        Bubble(free_in_s=(1.0, 1.0), sample_s=(1.0, 1.0), stream=(2, 3), ready_in_s=(1.1, 1.1, 0.0, 0.0), ...)
    """

    free_in_s: tuple[float, ...]
    """[S] when each slot ends its chunk; 0 if it is idle."""
    sample_s: tuple[float, ...]
    """[S] seconds each slot takes for one sample."""
    stream: tuple[int, ...]
    """[U] group of each unissued sample, in the order of issue: an index into `ready_in_s`, ascending."""
    ready_in_s: tuple[float, ...]
    """[M] per untrained group: when all its issued samples will be scored; 0 if none is issued."""
    chunk_size: int
    """Samples of a slot's chunk."""
    assist_chunk_size: int
    """Samples of a chunk that the trainer generates."""
    assist_chunk_s: float
    """Fixed seconds the trainer takes to generate a chunk."""
    assist_sample_s: float
    """Seconds per sample of such a chunk."""
    score_s: float
    """Seconds from a chunk's generation to its scores."""
    train_call_s: float
    """Fixed seconds of one training call."""
    train_group_s: float
    """Seconds of training per group."""
    max_groups: int
    """Maximum number of groups of one fragment."""
    min_groups: int = 1
    """Minimum number of groups of one fragment while more groups are to come."""
    is_barrier: bool = False
    """True: nothing trains before every group is ready."""
    later_groups: int = 0
    """Groups after those of the stream, with no sample issued."""
    later_samples: int = 0
    """Samples of each of them."""


@dataclass(frozen=True)
class Verdict:
    """Choice at a bubble, and its predictions."""

    choice: Choice
    makespan_s: float
    """Predicted end of the batch's last training call, from now, if the plan is followed."""
    waiting_s: float
    """Predicted end if the trainer never assists again."""
    wait_until_s: float
    """wait: when the next fragment will be ready, from now."""
    depth: int
    """Number of choices that were branched exactly."""
    covered: float = 1.0
    """Share of the groups left that were played chunk by chunk; the others are alike for every plan."""

    @property
    def gain_s(self) -> float:
        """waiting_s - makespan_s."""
        return self.waiting_s - self.makespan_s


Node = tuple[float, int, float, tuple[tuple[float, int], ...], tuple[float, ...]]
"""(trainer free at, position in the stream, ready time of the group being issued, sorted (free at, slot), sorted
ready times of the untrained groups without unissued samples)."""


@dataclass
class BubbleSearch:
    """Search at the bubbles of consecutive batches; keeps the plan being followed.

    Example:
        search = BubbleSearch()
        search.decide(bubble)   # Verdict("assist", makespan_s=3.1, waiting_s=3.6, ...)
        search.decide(later)    # at the next bubble; `forget()` first if the batch changed
    """

    max_work: int = MAX_WORK
    _plan: list[Choice] = field(default_factory=list)
    _answers: dict[tuple[Bubble, tuple[Choice, ...]], tuple[Verdict, tuple[Choice, ...]]] = field(default_factory=dict)
    """Cache of verdicts: in a steady state the same bubbles recur in every batch."""

    def forget(self) -> None:
        """Drop the plan that is being followed: another batch begins."""
        self._plan = []

    def decide(self, bubble: Bubble) -> Verdict:
        """The choice that ends the batch first under the model; "wait" on a tie."""
        question = (bubble, tuple(self._plan))
        answer = self._answers.get(question)
        if answer is None:
            answer = self._decide(bubble)
            if len(self._answers) == MAX_ANSWERS:
                self._answers.clear()
            self._answers[question] = answer
        verdict, plan = answer
        self._plan = list(plan)
        return verdict

    def _decide(self, bubble: Bubble) -> tuple[Verdict, tuple[Choice, ...]]:
        """The verdict, and the plan that remains after it."""
        play = _Play(bubble)
        root = play.root()
        waiting_s = play.never(root)
        best, plan = play.leaf(root)
        followed = play.follow(root, self._plan)
        if followed < best - EPSILON_S:
            best, plan = followed, list(self._plan)
        depth = 0
        floor = play.floor(root)
        next_level_work = play.work  # a level has twice the leaves of the one before, which share half of their work
        while depth < MAX_DEPTH and play.work + next_level_work <= self.max_work and best > floor + EPSILON_S:
            depth += 1
            play.truncated = False
            work_before = play.work
            value, found = play.best(root, depth)
            next_level_work = 2 * (play.work - work_before)
            if value < best - EPSILON_S:
                best, plan = value, found
            if not play.truncated:
                break
        if best >= waiting_s - EPSILON_S:
            best, plan = waiting_s, []
        choice: Choice = plan[0] if plan else "wait"
        played = len(bubble.ready_in_s)
        covered = played / (played + bubble.later_groups) if played else 1.0
        return Verdict(choice, best, waiting_s, play.next_ready_s(root), depth, covered), tuple(plan[1:])


class _Play:
    """Forward simulation from one bubble. `work` counts simulated chunks."""

    def __init__(self, bubble: Bubble):
        self.bubble = bubble
        self.work = 0
        self.truncated = False
        """True if the last `best` was cut off anywhere by its depth."""
        self._never: dict[Node, float] = {}
        self._leaf: dict[Node, tuple[float, list[Choice]]] = {}
        self._tree: dict[tuple[Node, int], tuple[float, list[Choice]]] = {}
        self._stream_end = len(bubble.stream)
        self._group_end = [0] * len(bubble.ready_in_s)
        for position, group in enumerate(bubble.stream):
            self._group_end[group] = position + 1

    def root(self) -> Node:
        bubble = self.bubble
        slots = tuple(sorted((free, index) for index, free in enumerate(bubble.free_in_s)))
        issued = tuple(sorted(ready for ready, end in zip(bubble.ready_in_s, self._group_end, strict=True) if end == 0))
        return self._advance((0.0, 0, 0.0, slots, issued), 0.0)

    # -- generation -----------------------------------------------------------------------------------------
    def _chunk(self, position: int, size: int) -> tuple[int, bool, float]:
        """(number of samples, True if it ends its group, ready time of the group's samples issued before)."""
        group = self.bubble.stream[position]
        end = self._group_end[group]
        num_samples = min(size, end - position)
        return num_samples, position + num_samples == end, self.bubble.ready_in_s[group]

    def _advance(self, node: Node, until_s: float) -> Node:
        """`node` after issuing every chunk that a slot takes up to `until_s`."""
        now_s, position, readiness, slots, issued = node
        if position == self._stream_end or not slots or slots[0][0] > until_s + EPSILON_S:
            return node
        bubble = self.bubble
        heap, done = list(slots), list(issued)
        while position < self._stream_end and heap[0][0] <= until_s + EPSILON_S:
            free, slot = heap[0]
            num_samples, is_last, before = self._chunk(position, bubble.chunk_size)
            end = free + num_samples * bubble.sample_s[slot]
            heapreplace(heap, (end, slot))
            readiness = max(readiness, before, end + bubble.score_s)
            position += num_samples
            self.work += 1
            if is_last:
                done.append(readiness)
                readiness = 0.0
        done.sort()
        heap.sort()
        return now_s, position, readiness, tuple(heap), tuple(done)

    def next_ready_s(self, node: Node) -> float:
        """Time at which the next fragment is ready if the trainer waits; infinite if no slot will ever generate it."""
        return self._until_ready(node)[1]

    def _until_ready(self, node: Node) -> tuple[Node, float]:
        """Issue chunks until it is known when the next fragment is ready; (node, that time)."""
        min_groups = len(self.bubble.ready_in_s) if self.bubble.is_barrier else self.bubble.min_groups
        while True:
            _, position, _, slots, issued = node
            is_all = position == self._stream_end
            ready_s = issued[min(min_groups, len(issued)) - 1] if issued else float("inf")
            if len(issued) < min_groups and not is_all:
                ready_s = float("inf")
            if is_all or not slots or ready_s <= slots[0][0] + EPSILON_S:
                return node, ready_s
            node = self._advance(node, slots[0][0])

    # -- the trainer ----------------------------------------------------------------------------------------
    def _settle(self, node: Node) -> Node:
        """Train ready groups until the next bubble or the end."""
        bubble = self.bubble
        largest = len(bubble.ready_in_s) if bubble.is_barrier else bubble.max_groups
        while True:
            now_s, position, readiness, slots, issued = node = self._advance(node, node[0])
            num_trained = 0
            while True:
                num_ready = bisect_right(issued, now_s + EPSILON_S) - num_trained
                is_all = position == self._stream_end and num_trained + num_ready == len(issued)
                if num_ready == 0 or (not is_all and (bubble.is_barrier or num_ready < bubble.min_groups)):
                    break
                taken = min(num_ready, largest)
                num_trained += taken
                now_s += bubble.train_call_s + taken * bubble.train_group_s
                if position < self._stream_end and slots and slots[0][0] <= now_s + EPSILON_S:
                    break  # chunks that slots take meanwhile may be ready too
            if num_trained == 0:
                return node
            node = (now_s, position, readiness, slots, issued[num_trained:])

    def wait(self, node: Node) -> Node:
        """The next bubble if the trainer waits at this one."""
        self.work += len(node[3]) // SLOTS_PER_PLAY
        node, ready_s = self._until_ready(node)
        return self._settle((max(node[0], ready_s), *node[1:]))

    def assist(self, node: Node) -> Node:
        """The next bubble if the trainer generates the next chunk at this one."""
        bubble = self.bubble
        self.work += 1 + len(node[3]) // SLOTS_PER_PLAY
        now_s, position, readiness, slots, issued = node
        num_samples, is_last, before = self._chunk(position, bubble.assist_chunk_size)
        now_s += bubble.assist_chunk_s + num_samples * bubble.assist_sample_s
        readiness = max(readiness, before, now_s + bubble.score_s)
        if is_last:
            done = list(issued)
            insort(done, readiness)
            issued, readiness = tuple(done), 0.0
        return self._settle((now_s, position + num_samples, readiness, slots, issued))

    def can_assist(self, node: Node) -> bool:
        return node[1] < self._stream_end

    # -- values ---------------------------------------------------------------------------------------------
    def never(self, node: Node) -> float:
        """End of training if the trainer does not assist from `node` on."""
        known = self._never.get(node)
        if known is not None:
            return known
        bubble = self.bubble
        now_s, position, readiness, slots, issued = node
        done = list(issued)
        if position < self._stream_end:
            if not slots:
                return float("inf")
            heap = list(slots)
            heapify(heap)
            stream, ends, before = bubble.stream, self._group_end, bubble.ready_in_s
            chunk_size, sample_s, score_s = bubble.chunk_size, bubble.sample_s, bubble.score_s
            while position < self._stream_end:
                group = stream[position]
                num_samples = min(chunk_size, ends[group] - position)
                free, slot = heap[0]
                end = free + num_samples * sample_s[slot]
                heapreplace(heap, (end, slot))
                readiness = max(readiness, before[group], end + score_s)
                position += num_samples
                self.work += 1
                if position == ends[group]:
                    done.append(readiness)
                    readiness = 0.0
            done.sort()
            slots = tuple(heap)
        if bubble.later_groups:
            free_s = [(free, bubble.sample_s[slot]) for free, slot in slots]
            done += later_ready_s(free_s, bubble.later_groups, bubble.later_samples, bubble.chunk_size, bubble.score_s)
        value = self._train_all(now_s, done)
        self._never[node] = value
        return value

    def _train_all(self, now_s: float, ready: Sequence[float]) -> float:
        """End of training groups that are ready at these times, ascending."""
        bubble = self.bubble
        if bubble.is_barrier:
            return max(now_s, ready[-1]) + bubble.train_call_s + len(ready) * bubble.train_group_s if ready else now_s
        if bubble.train_call_s == 0 and bubble.min_groups == 1:
            train_s = bubble.train_group_s
            for ready_s in ready:
                now_s = (ready_s if ready_s > now_s else now_s) + train_s
            return now_s
        first = 0
        while first < len(ready):
            now_s = max(now_s, ready[min(first + bubble.min_groups, len(ready)) - 1])
            last = first + 1
            while last < len(ready) and last - first < bubble.max_groups and ready[last] <= now_s + EPSILON_S:
                last += 1
            now_s += bubble.train_call_s + (last - first) * bubble.train_group_s
            first = last
        return now_s

    def leaf(self, node: Node) -> tuple[float, list[Choice]]:
        """Best of the heuristic plans from `node` on."""
        known = self._leaf.get(node)
        if known is None:
            known = self._leaf[node] = min(
                (self._path(node, is_eager=True), self._path(node, is_eager=False)), key=lambda found: found[0]
            )
        return known

    def _path(self, node: Node, *, is_eager: bool) -> tuple[float, list[Choice]]:
        """Best stopping point on one path of assists: at every bubble, or where no fragment is delayed."""
        choices: list[Choice] = []
        stops = [(node, 0)]
        while self.can_assist(node) and len(choices) < PATH_CHOICES:
            if is_eager or self._fits(node):
                node = self.assist(node)
                choices.append("assist")
                stops.append((node, len(choices)))
            else:
                node = self.wait(node)
                choices.append("wait")
        index = self._lowest([stop for stop, _ in stops])
        return self.never(stops[index][0]), choices[: stops[index][1]]

    def _lowest(self, stops: Sequence[Node]) -> int:
        """Index of the stop from which never assisting ends first: tries all if few, else a grid, then refines it."""
        fewest, most = STOPS_TRIED
        num_left = self._stream_end - stops[0][1]
        num_tried = min(most, max(fewest, MAX_WORK // (2 * max(1, num_left))))
        stride = 1
        while len(stops) > num_tried * stride:
            stride *= 2
        tried = range(0, len(stops), stride)
        best = min(tried, key=lambda index: self.never(stops[index]))
        while stride > 1:
            stride //= 2
            near = [index for index in (best - stride, best, best + stride) if 0 <= index < len(stops)]
            best = min(near, key=lambda index: (self.never(stops[index]), index))
        return best

    def _fits(self, node: Node) -> bool:
        bubble = self.bubble
        num_samples, _, _ = self._chunk(node[1], bubble.assist_chunk_size)
        end_s = node[0] + bubble.assist_chunk_s + num_samples * bubble.assist_sample_s
        return end_s <= self.next_ready_s(node) + EPSILON_S

    def follow(self, node: Node, plan: Sequence[Choice]) -> float:
        """End of training if `plan` is followed from `node` on, and the trainer waits after it."""
        for choice in plan:
            if not self.can_assist(node):
                break
            node = self.assist(node) if choice == "assist" else self.wait(node)
        return self.never(node)

    def floor(self, node: Node) -> float:
        """Lower bound of the end of training: all training lies ahead, and nothing trains before it is ready."""
        now_s, position, _, _, issued = node
        bubble = self.bubble
        open_groups = len({*bubble.stream[position:]}) + bubble.later_groups
        left_s = (len(issued) + open_groups) * bubble.train_group_s + bubble.train_call_s
        earliest_s = min([now_s + bubble.score_s, *issued]) if open_groups else (issued[0] if issued else now_s)
        return max(now_s, earliest_s) + left_s

    def best(self, node: Node, depth: int) -> tuple[float, list[Choice]]:
        """Best plan from `node`, branching `depth` choices exactly."""
        if not self.can_assist(node):
            return self.never(node), []
        if depth == 0:
            self.truncated = True
            return self.leaf(node)
        key = (node, depth)
        known = self._tree.get(key)
        if known is not None:
            return known
        value, plan = self.leaf(node)
        children: tuple[Choice, ...] = ("assist",) if self.bubble.is_barrier else ("assist", "wait")
        for choice in children:
            child = self.assist(node) if choice == "assist" else self.wait(node)
            below, rest = self.best(child, depth - 1)
            if below < value - EPSILON_S:
                value = below
                plan: list[Choice] = [choice, *rest]
        answer = self._tree[key] = (value, plan)
        return answer
