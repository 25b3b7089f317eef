# SPDX-License-Identifier: Apache-2.0
"""One call of many processes, through relays where there are many: trainer ranks, workers of the replicas.

    driver -> relay -> relay of a node -> process        nothing calls more than FAN_OUT others, up to 256 nodes

A call costs its caller CPU time, and the last process begins only when the caller has sent the last call. With more
than FAN_OUT processes every node has a relay, a process that calls the node's; with more than FAN_OUT nodes other
relays call these, each about as many as the driver does. docs/control_plane.md has what it saves.

A process that raises, or dies, gives the caller its exception at once: others may wait for that one in a collective. A
relay that dies gives its RayActorError; relays run on the nodes of what they call.

Invariants (tests/processes/test_relays.py): every process is called once; answers have the order of the processes; an
exception has the same type and text through relays as without.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from math import ceil, sqrt
from typing import Any, Literal, TypeVar

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

FAN_OUT = 16
"""Most processes that one process calls: two nodes of eight devices are called directly."""

Keep = Literal["all", "first", "outcomes"]
"""Answers that a call returns: of all processes, of the first one (all are awaited), or of all with an exception in
place of the answer of one that failed."""

Item = TypeVar("Item")


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


@dataclass(frozen=True)
class Process:
    """One process, called directly by its Ray handle; its methods' names have `prefix`."""

    actor: Any
    prefix: str = ""
    num_processes = 1

    async def call(self, work: Work, keep: Keep) -> list[Any]:
        kwargs = {**work.kwargs, **(work.kwargs_of[0] if work.kwargs_of else {})}
        try:
            return [await getattr(self.actor, self.prefix + work.method).remote(*work.args, **kwargs)]
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

    async def call(self, work: Work, keep: Keep) -> list[Any]:
        """Have every process do its work. RayError of the first process or relay that fails, unless `keep` is
        `outcomes`."""
        calls, first = [], 0
        for callee in self.callees:
            calls.append(callee.call(work.share(first, callee.num_processes), keep))
            first += callee.num_processes
        parts = await asyncio.gather(*calls)
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
    """The processes behind a relay, the Ray handle of a `Relay`."""

    relay: Any
    num_processes: int

    async def call(self, work: Work, keep: Keep) -> list[Any]:
        try:
            answers, failure = await self.relay.relay.remote(work, keep)
        except RayError as error:
            if keep == "outcomes":
                return [error] * self.num_processes
            raise
        if failure is not None:
            raise failure
        return answers


Callee = Process | Together | Relayed
"""One or more processes."""


def start_relay(node: str, callees: Sequence[Callee]) -> Relayed:
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    relay = ray.remote(Relay).options(num_cpus=0, scheduling_strategy=here).remote(callees)
    return Relayed(relay, Together(callees).num_processes)


def relayed(
    processes: Sequence[Callee],
    nodes: Sequence[str],
    start: Callable[[str, Sequence[Callee]], Callee] = start_relay,
    fan_out: int = FAN_OUT,
) -> Together:
    """Start the relays that are needed to call these processes -> what the driver calls. `nodes` has the node of each
    process; at most `fan_out` processes are called without relays, and by a node's relay."""
    if len(processes) <= fan_out:
        return Together(processes)
    relays: list[tuple[str, Callee]] = []
    for node, of_node in groupby(zip(nodes, processes, strict=True), key=lambda placed: placed[0]):
        relays += [(node, start(node, part)) for part in _parts([process for _, process in of_node], fan_out)]
    if len(relays) > fan_out:
        parts = _parts(relays, ceil(sqrt(len(relays))))
        relays = [(part[0][0], start(part[0][0], [relay for _, relay in part])) for part in parts]
    return Together([relay for _, relay in relays])


def _parts(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Split into parts of `size`; the last one may be smaller."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def ranks_of(worker_group: Any, *, answer_s: float) -> Together:
    """The ranks of a worker group of `DiffusionWorker`; see `reach` for the errors."""
    # verl binds a worker's methods under the prefix of its role, and names the class of a bound method by it
    prefix = type(worker_group.begin).__name__.removesuffix("begin")
    return reach([Process(actor, prefix) for actor in worker_group.workers], answer_s=answer_s)


def reach(processes: Sequence[Process], *, answer_s: float) -> Together:
    """Start the relays that are needed to call these processes. Each tells on which node it is: RayActorError if one
    died, GetTimeoutError if one does not answer within `answer_s`."""
    if len(processes) <= FAN_OUT:
        return Together(processes)
    asked = [one.actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for one in processes]
    return relayed(processes, ray.get(asked, timeout=answer_s))


class Route:
    """The way to processes of which some may end and others join: found when it is first asked for, and whenever they
    have changed. Each may take `answer_s` to tell on which node it is."""

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
        """Kill the relays: a call that waits for one raises. The next call reconnects."""
        end_relays(self._way)
        self._way, self._actors = Together([]), []


def end_relays(callee: Together) -> None:
    """Kill the relays that the driver calls: a call that waits for one raises, even if the relay's node hangs."""
    for one in callee.callees:
        if isinstance(one, Relayed):
            ray.kill(one.relay)
