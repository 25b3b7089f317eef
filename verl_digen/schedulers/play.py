# SPDX-License-Identifier: Apache-2.0
"""The makespan model of a batch: from a bubble forward, with any choices of the trainer. Pure.

- Slots take the next chunk of the sample stream as soon as they are free; a group is ready `score_s` after its last
  chunk; the trainer trains ready groups at once, oldest readiness first, and assists only at bubbles, with one of the
  bubble's sizes. An assist takes the next samples of the stream, of as many groups as they belong to.
- The value of a leaf is the best of "never assist again" and "assist at the next k bubbles" for every k; with each size
  at the root, with the best of them below it.

Invariant (tests/schedulers/test_search.py): a slot's chunk is of one group, an assist of as many as it has samples for.

Complexity, with M groups and S slots or bundles: O(log S) per chunk, O(log M + its groups) per assist, O(S) per choice.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

EPSILON_S = 1e-7
"""Times closer than this are the same moment: the order of a sum changes its rounding."""

MAX_WORK = 4_000
"""Simulated chunks in one decision before the search stops deepening; a few ms of Python."""

SLOTS_PER_PLAY = 16
"""Number of slots whose state is copied in about the time of simulating one chunk."""

STOPS_TRIED = (4, 16)
"""(min, max) numbers of assists that a leaf tries before it refines around the best. In between, limited by
MAX_WORK / 2; the fewest with bundles, whose times are means."""

MAX_ASSISTS = 128
"""Most assists of a leaf's plan; a search at the next bubble reaches one further."""

Choice = int
"""Samples that the trainer generates; 0: it waits."""

WAIT: Choice = 0


@dataclass(frozen=True)
class Bubble:
    """State of the trainer's batch at a bubble; times are seconds from now.

    Example, two slots that become free in 1 s, two groups of one sample in flight, two unissued:
        Bubble(free_in_s=(1.0, 1.0), sample_s=(1.0, 1.0), unissued=(0, 0, 1, 1), ready_in_s=(1.1, 1.1, 0.0, 0.0), ...)
    """

    free_in_s: tuple[float, ...]
    """[S] when each slot, or bundle of slots, ends its chunk; 0 if it is idle."""
    sample_s: tuple[float, ...]
    """[S] seconds each of its slots takes for one sample."""
    unissued: tuple[int, ...]
    """[M] samples left to issue of each untrained group, in the order of issue."""
    ready_in_s: tuple[float, ...]
    """[M] when all issued samples of the group will be scored; 0 if none is issued."""
    chunk_size: int
    """Samples of a slot's chunk."""
    assist_sizes: tuple[int, ...]
    """Samples that an assist may have, ascending; it may have fewer if no more are left."""
    assist_call_s: float
    """Fixed seconds of an assist."""
    assist_round_s: float
    """Seconds of a round: one sample on each rank."""
    score_s: float
    """Seconds from a chunk's generation to its scores."""
    train_call_s: float
    """Fixed seconds of one training call."""
    train_group_s: float
    """Seconds of training per group."""
    max_groups: int
    """Maximum number of groups of one fragment."""
    num_ranks: int = 1
    """Ranks of the trainer."""
    is_barrier: bool = False
    """True: nothing trains before every group is ready."""
    spans_groups: bool = True
    """False: the samples of an assist are of one group."""
    bundle: int = 1
    """Slots of a bundle, which take chunks together, of samples of several groups; 1: single slots, whose chunks are of
    one group."""


Node = tuple[float, int, float, tuple[tuple[float, int], ...], tuple[float, ...]]
"""(trainer free at, position in the stream, ready time of the group being issued, sorted (free at, slot), sorted
ready times of the untrained groups without unissued samples)."""


class Play:
    """Forward simulation from one bubble. `work` counts simulated chunks."""

    def __init__(self, bubble: Bubble):
        self.bubble = bubble
        self.work = 0
        self.truncated = False
        """True if the last `best` was cut off anywhere by its depth."""
        self._never: dict[Node, float] = {}
        self._leaf: dict[Node, tuple[float, Choice]] = {}
        self._tree: dict[tuple[Node, int], tuple[float, Choice]] = {}
        begun = [(left, ready) for left, ready in zip(bubble.unissued, bubble.ready_in_s, strict=True) if left]
        self._ends = list(accumulate(left for left, _ in begun))
        """Position in the stream after each group with samples left."""
        self._before = [ready for _, ready in begun]
        """Ready time of their samples issued before."""
        self._stream_end = self._ends[-1] if self._ends else 0
        self._sizes = bubble.assist_sizes
        """Sizes that a leaf compares."""

    def root(self) -> Node:
        bubble = self.bubble
        slots = tuple(sorted((free, index) for index, free in enumerate(bubble.free_in_s)))
        issued = tuple(
            sorted(ready for ready, left in zip(bubble.ready_in_s, bubble.unissued, strict=True) if left == 0)
        )
        return self._advance((0.0, 0, 0.0, slots, issued), 0.0)

    # -- generation -----------------------------------------------------------------------------------------
    def _assisted(self, position: int, size: int) -> tuple[int, float]:
        """(samples of an assist of `size` from `position` on, seconds that it takes)."""
        bubble = self.bubble
        end = self._stream_end if bubble.spans_groups else self._ends[bisect_right(self._ends, position)]
        num_samples = min(size, end - position)
        return num_samples, bubble.assist_call_s - (-num_samples // bubble.num_ranks) * bubble.assist_round_s

    def _advance(self, node: Node, until_s: float) -> Node:
        """`node` after issuing every chunk that a slot takes up to `until_s`."""
        now_s, position, readiness, slots, issued = node
        if position == self._stream_end or not slots or slots[0][0] > until_s + EPSILON_S:
            return node
        heap, done = list(slots), list(issued)
        position, readiness = self._play_slots(heap, position, readiness, done, until_s)
        done.sort()
        heap.sort()
        return now_s, position, readiness, tuple(heap), tuple(done)

    def _play_slots(
        self, heap: list[tuple[float, int]], position: int, readiness: float, done: list[float], until_s: float
    ) -> tuple[int, float]:
        """Have slots take chunks up to `until_s` -> (position, readiness); changes `heap`, and extends `done`."""
        bubble, ends, stream_end = self.bubble, self._ends, self._stream_end
        sample_s, score_s, bundle = bubble.sample_s, bubble.score_s, bubble.bundle
        largest = bubble.chunk_size * bundle
        group = bisect_right(ends, position)
        until_s += EPSILON_S
        while position < stream_end and heap[0][0] <= until_s:
            free, slot = heap[0]
            num_samples = min(largest, (ends[group] if bundle == 1 else stream_end) - position)
            end = free - (-num_samples // bundle) * sample_s[slot]
            heapreplace(heap, (end, slot))
            position += num_samples
            self.work += 1
            group, readiness = self._deliver(group, position, end + score_s, readiness, done)
        return position, readiness

    def _deliver(
        self, group: int, position: int, scored_s: float, readiness: float, done: list[float]
    ) -> tuple[int, float]:
        """Note that samples from `group` on, up to `position`, are scored at `scored_s` -> (group, readiness) there."""
        ends, before = self._ends, self._before
        while True:
            if scored_s > readiness:
                readiness = scored_s
            if before[group] > readiness:
                readiness = before[group]
            if position < ends[group]:
                return group, readiness
            done.append(readiness)
            readiness = 0.0
            group += 1
            if position == ends[group - 1]:
                return group, readiness

    def until_ready(self, node: Node) -> tuple[Node, float]:
        """Issue chunks until it is known when the next fragment is ready if the trainer waits -> (node, that time,
        infinite if no slot will ever generate it)."""
        min_groups = len(self.bubble.ready_in_s) if self.bubble.is_barrier else 1
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
                if num_ready == 0 or (not is_all and bubble.is_barrier):
                    break
                taken = min(num_ready, largest)
                num_trained += taken
                now_s += bubble.train_call_s + taken * bubble.train_group_s
                if slots and slots[0][0] <= now_s + EPSILON_S:
                    break  # chunks that slots take meanwhile may be ready too
            if num_trained == 0:
                return node
            node = (now_s, position, readiness, slots, issued[num_trained:])

    def wait(self, node: Node) -> Node:
        """The next bubble if the trainer waits at this one."""
        self.work += len(node[3]) // SLOTS_PER_PLAY
        node, ready_s = self.until_ready(node)
        return self._settle((max(node[0], ready_s), *node[1:]))

    def assist(self, node: Node, size: int) -> Node:
        """The next bubble if the trainer generates the next `size` samples at this one."""
        self.work += 1 + len(node[3]) // SLOTS_PER_PLAY
        now_s, position, readiness, slots, issued = node
        num_samples, seconds = self._assisted(position, size)
        now_s += seconds
        done = list(issued)
        group = bisect_right(self._ends, position)
        position += num_samples
        _, readiness = self._deliver(group, position, now_s + self.bubble.score_s, readiness, done)
        done.sort()
        return self._settle((now_s, position, readiness, slots, tuple(done)))

    def can_assist(self, node: Node) -> bool:
        return node[1] < self._stream_end

    # -- values ---------------------------------------------------------------------------------------------
    def never(self, node: Node) -> float:
        """End of training if the trainer does not assist from `node` on."""
        known = self._never.get(node)
        if known is not None:
            return known
        now_s, position, readiness, slots, issued = node
        done = list(issued)
        if position < self._stream_end:
            if not slots:
                return float("inf")
            self._play_slots(list(slots), position, readiness, done, float("inf"))
            done.sort()
        value = self._train_all(now_s, done)
        self._never[node] = value
        return value

    def _train_all(self, now_s: float, ready: Sequence[float]) -> float:
        """End of training groups that are ready at these times, ascending."""
        bubble = self.bubble
        if bubble.is_barrier:
            return max(now_s, ready[-1]) + bubble.train_call_s + len(ready) * bubble.train_group_s if ready else now_s
        if bubble.train_call_s == 0:
            train_s = bubble.train_group_s
            for ready_s in ready:
                now_s = (ready_s if ready_s > now_s else now_s) + train_s
            return now_s
        first = 0
        while first < len(ready):
            now_s = max(now_s, ready[first])
            last = first + 1
            while last < len(ready) and last - first < bubble.max_groups and ready[last] <= now_s + EPSILON_S:
                last += 1
            now_s += bubble.train_call_s + (last - first) * bubble.train_group_s
            first = last
        return now_s

    def leaf(self, node: Node) -> tuple[float, Choice]:
        """Best of the plans that assist with one size from `node` on, and stop -> (end of training, first choice)."""
        known = self._leaf.get(node)
        if known is None:
            paths = [self._path(node, size) for size in self._sizes]
            best = min(range(len(paths)), key=lambda index: paths[index][0])
            known = self._leaf[node] = paths[best]
            self._sizes = self._sizes[best : best + 1]
        return known

    def _path(self, node: Node, size: int) -> tuple[float, Choice]:
        """End of training after the best number of assists of `size` in a row -> (that, the first choice)."""
        stops = [node]
        while self.can_assist(stops[-1]) and len(stops) <= MAX_ASSISTS:
            stops.append(self.assist(stops[-1], size))
        number = self._lowest(stops)
        return self.never(stops[number]), size if number else WAIT

    def _lowest(self, stops: Sequence[Node]) -> int:
        """Index of the stop from which never assisting ends first: tries all if few, else a grid, then refines it."""
        fewest, most = STOPS_TRIED
        num_left = (self._stream_end - stops[0][1]) // self.bubble.bundle
        num_tried = fewest
        if self.bubble.bundle == 1:
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

    def best(self, node: Node, depth: int) -> tuple[float, Choice]:
        """Best plan from `node`, branching `depth` choices exactly -> (end of training, first choice)."""
        if not self.can_assist(node):
            return self.never(node), WAIT
        if depth == 0:
            self.truncated = True
            return self.leaf(node)
        key = (node, depth)
        known = self._tree.get(key)
        if known is not None:
            return known
        value, first = self.leaf(node)
        children = self.bubble.assist_sizes if self.bubble.is_barrier else (*self.bubble.assist_sizes, WAIT)
        for choice in children:
            child = self.assist(node, choice) if choice else self.wait(node)
            below, _ = self.best(child, depth - 1)
            if below < value - EPSILON_S:
                value, first = below, choice
        answer = self._tree[key] = (value, first)
        return answer
