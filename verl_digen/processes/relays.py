# SPDX-License-Identifier: Apache-2.0
"""One call of many processes, through a tree of relays where there are many: trainer ranks, workers of the replicas.

    driver -> relay -> relay of a node -> process        nothing calls more than FAN_OUT others

A call costs its caller CPU time, and the last process begins only when the caller has sent the last call. Up to FAN_OUT
processes are called directly. With more of them every node has a relay, a process that calls those of the node; with
more than FAN_OUT nodes other relays call these, each about as many as the driver does. docs/control_plane.md has what
it saves.

| failure | the caller gets |
| --- | --- |
| a process raises | its exception, at once: others may wait for that one in a collective |
| a process dies | its RayActorError, at once |
| a relay dies | the relay's RayActorError; relays run on the nodes of what they call |

Invariants (tests/processes/test_relays.py)
- Every process is called once. Answers have the order of the processes.
- An exception has the same type and text through relays as without.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from math import ceil
from typing import Any, Literal, Protocol

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl_digen.processes.answers import Sent, answers_of

FAN_OUT = 16
"""Most processes that one process calls: those of two nodes of eight devices are called directly."""

Keep = Literal["all", "first", "outcomes"]
"""Answers that a call returns: of all processes, of the first one (all are awaited), or of all with an exception in
place of the answer of one that failed."""


@dataclass(frozen=True)
class Work:
    """A method to call."""

    method: str
    args: Sequence[Any] = ()
    """A Ray reference among them is resolved by each process."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    kwargs_of: Sequence[Mapping[str, Any]] | None = None
    """[processes] further arguments of each process; None if there are none."""

    def share(self, first: int, count: int) -> Work:
        """The work of `count` processes from number `first` on."""
        return self if self.kwargs_of is None else replace(self, kwargs_of=self.kwargs_of[first : first + count])


class Callee(Protocol):
    """One or more processes."""

    @property
    def num_processes(self) -> int: ...

    def send(self, work: Work, keep: Keep) -> list[Sent]:
        """Have every process do its work; what is read from the calls raises RayError, unless `keep` is `outcomes`."""
        ...


@dataclass(frozen=True)
class Process:
    """One process, called directly.

    Args:
        actor: its Ray handle.
        prefix: of the methods' names on it.
    """

    actor: Any
    prefix: str = ""

    @property
    def num_processes(self) -> int:
        return 1

    def send(self, work: Work, keep: Keep) -> list[Sent]:
        kwargs = {**work.kwargs, **(work.kwargs_of[0] if work.kwargs_of else {})}
        answer = getattr(self.actor, self.prefix + work.method).remote(*work.args, **kwargs)
        return [Sent(answer.future(), partial(self._read, keep))]

    @staticmethod
    def _read(keep: Keep, answer: Future[Any]) -> list[Any]:
        try:
            return [answer.result()]
        except RayError as error:
            if keep == "outcomes":
                return [error]
            raise


@dataclass(frozen=True)
class Together:
    """Several callees, called at the same time."""

    callees: Sequence[Callee]

    @property
    def num_processes(self) -> int:
        return sum(callee.num_processes for callee in self.callees)

    def send(self, work: Work, keep: Keep) -> list[Sent]:
        calls, first = [], 0
        for callee in self.callees:
            calls += callee.send(work.share(first, callee.num_processes), keep)
            first += callee.num_processes
        return calls

    async def call(self, work: Work, keep: Keep) -> list[Any]:
        """Have every process do its work.

        Raises:
            RayError: the first failure of a process or a relay, unless `keep` is `outcomes`.
        """
        parts = await answers_of(self.send(work, keep))
        return parts[0] if keep == "first" else [answer for part in parts for answer in part]


class Relay:
    """The process of a relay; a Ray actor. It has no state, so calls may overtake one another: the driver begins a call
    that depends on another one when that one has ended."""

    def __init__(self, callees: Sequence[Callee]):
        self._callees = Together(callees)

    async def relay(self, work: Work, keep: Keep) -> tuple[list[Any], RayError | None]:
        """Have every process behind this relay work -> answers, failure. The failure is returned, because Ray would
        wrap what is raised here."""
        try:
            return await self._callees.call(work, keep), None
        except RayError as error:
            return [], error


@dataclass(frozen=True)
class Relayed:
    """The processes behind a relay.

    Args:
        relay: Ray handle of a `Relay`.
    """

    relay: Any
    num_processes: int

    def send(self, work: Work, keep: Keep) -> list[Sent]:
        return [Sent(self.relay.relay.remote(work, keep).future(), partial(self._read, keep))]

    def _read(self, keep: Keep, answer: Future[Any]) -> list[Any]:
        try:
            answers, failure = answer.result()
        except RayError as error:
            if keep == "outcomes":
                return [error] * self.num_processes
            raise
        if failure is not None:
            raise failure
        return answers


@dataclass(frozen=True)
class Branch:
    """A relay in a tree: its node, and the numbers of the processes or the branches that it calls."""

    node: str
    callees: Sequence[int | Branch]


def tree(nodes: Sequence[str], fan_out: int = FAN_OUT) -> Sequence[int | Branch]:
    """Plan what the driver calls, and what the relays call.

    Args:
        nodes: [processes] node of each.
        fan_out: most callees of one caller, at least 2.

    Example:
        tree(["a"] * 4, fan_out=4)                  # 0, 1, 2, 3
        tree(["a"] * 4 + ["b"] * 4, fan_out=4)      # Branch("a", (0, 1, 2, 3)), Branch("b", (4, 5, 6, 7))
    """
    if len(nodes) <= fan_out:
        return tuple(range(len(nodes)))
    level: list[Branch] = []
    for node, of_node in groupby(range(len(nodes)), key=lambda number: nodes[number]):
        level += [Branch(node, numbers) for numbers in _evenly(tuple(of_node), fan_out)]
    width = _even_width(len(level), fan_out)
    while len(level) > fan_out:
        level = [Branch(branches[0].node, branches) for branches in _evenly(tuple(level), width)]
    return tuple(level)


def _even_width(count: int, at_most: int) -> int:
    """Fan-out of a tree with as few levels as `at_most` allows: every caller has about as many callees."""
    num_levels = next(levels for levels in itertools.count(1) if at_most**levels >= count)
    return next(width for width in range(1, at_most + 1) if width**num_levels >= count)


def _evenly(callees: tuple[Any, ...], at_most: int) -> list[tuple[Any, ...]]:
    """Split into as few parts of at most `at_most` as there can be, of about equal size."""
    num_parts = ceil(len(callees) / at_most)
    bounds = [number * len(callees) // num_parts for number in range(num_parts + 1)]
    return [callees[start:end] for start, end in pairwise(bounds)]


def ranks_of(worker_group: Any, *, answer_s: float) -> Together:
    """The ranks of verl's worker group of `DiffusionWorker`; see `reach` for the errors."""
    # verl binds a worker's methods under the prefix of its role, and names the class of a bound method by it
    prefix = type(worker_group.begin).__name__.removesuffix("begin")
    return reach([Process(actor, prefix) for actor in worker_group.workers], answer_s=answer_s)


def reach(processes: Sequence[Process], *, answer_s: float) -> Together:
    """Start the relays that are needed to call these processes.

    Args:
        answer_s: how long a process may take to answer on which node it is.

    Raises:
        RayActorError: a process died. GetTimeoutError: one does not answer.
    """
    if len(processes) <= FAN_OUT:
        return Together(processes)
    nodes = ray.get([process.actor.__ray_call__.remote(_node) for process in processes], timeout=answer_s)
    return start_relays(tree(nodes), processes)


class Route:
    """The way to processes of which some may end and others join: found when it is first asked for, and whenever they
    have changed.

    Args:
        answer_s: how long a process may take to answer on which node it is.
    """

    def __init__(self, answer_s: float):
        self._answer_s = answer_s
        self._actors: list[Any] = []
        self._way = Together([])

    def to(self, actors: Sequence[Any]) -> Together:
        """Return what the driver is to call; for errors see `reach`. Blocks: not for the driver's loop."""
        if [*actors] != self._actors:
            self.end()
            self._way, self._actors = reach([Process(actor) for actor in actors], answer_s=self._answer_s), [*actors]
        return self._way

    def end(self) -> None:
        """Kill the relays: a call that waits for one raises. The next call finds the way anew."""
        end_relays(self._way)
        self._way, self._actors = Together([]), []


def start_relays(callees: Sequence[int | Branch], processes: Sequence[Process]) -> Together:
    """Start the relays of a tree, the outermost last -> what the driver calls."""
    return Together([processes[one] if isinstance(one, int) else _start(one, processes) for one in callees])


def end_relays(callee: Together) -> None:
    """Kill the relays that the driver calls: a call that waits for one raises, even if the relay's node hangs."""
    for one in callee.callees:
        if isinstance(one, Relayed):
            ray.kill(one.relay)


def _start(branch: Branch, processes: Sequence[Process]) -> Relayed:
    below = start_relays(branch.callees, processes)
    here = NodeAffinitySchedulingStrategy(node_id=branch.node, soft=False)
    relay = ray.remote(Relay).options(num_cpus=0, scheduling_strategy=here).remote(below.callees)
    return Relayed(relay, below.num_processes)


def _node(actor: Any) -> str:
    return ray.get_runtime_context().get_node_id()
