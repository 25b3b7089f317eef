# SPDX-License-Identifier: Apache-2.0
"""Cost of one call of all trainer ranks, and of one weight update: without relays and with them, with real Ray actors.

    python examples/research/rank_calls.py                                 # the table of docs/control_plane.md
    python examples/research/rank_calls.py --ranks 896 --workers 128

| call | without relays | with relays |
| --- | --- | --- |
| a fragment | one call of each rank | `verl_digen.processes.relays`, as the trainer's `accumulate` |
| a weight update | verl's manager: four calls of each rank and each replica's worker | `StagedCheckpointManager` |
| signs of life | one call of each server and each worker of a replica | `Replicas.forget_lost` |
| health | one call of each server | as `Replicas.metrics` |

A few actors stand for all ranks and workers, each under many handles, and do nothing; no weight is sent. Every relay is
a process of its own. All of them share this machine's cores, so that the last answer comes later with relays, which
make more calls in all. The driver's CPU time, which is that of all its threads, is the number to read.

On a cluster relays have cores of their own. The first table has the CPU time of one process that calls others, and
from it, calculated, the time until the last answer has come: the CPU times of the callers on the way to a process, and
at each of them the rest of a call's round trip.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import median
from types import SimpleNamespace
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.processes.relays import Callee, Process, Relayed, Route, Together, Work, relayed, start_relay
from verl_digen.trainer.staged import StagedCheckpointManager
from verl_digen.types import Geometry, SampleFacts, Sampling

SAMPLING = Sampling(Geometry(1024, 1024), 28, 1.0, "flow", 0.7)


class Rank:
    """A rank, or a worker of a replica: answers at once."""

    def accumulate(self, fragment: Any) -> dict[str, float]:
        return {"num_rows": 216.0, "fetch_s": 0.0, "accumulate_s": 0.0}

    def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> None:
        return None

    def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]:
        return {}

    def check_health(self) -> dict[str, Any]:
        version = {"version": 7, "received_version": 7, "last_update": {"load_s": 0.1, "drain_s": 0.1}}
        return {**version, "prompt_cache": {"hits": 3, "misses": 1}}


class Bound(Rank):
    """The methods as verl's worker groups bind them. The actors are of the plain class, whose handles load no verl."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)  # type: ignore[attr-defined] - a dynamic enum
    def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> None: ...

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # type: ignore[attr-defined]
    def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> dict[str, Any]: ...


class NoTransfer:
    """A checkpoint engine that sends nothing; the manager asks its class alone."""

    @classmethod
    def build_topology(cls, num_ranks: int, num_receivers: int, metadata: list[Any]) -> tuple[dict, dict]:
        return {}, {}


CheckpointEngineRegistry.register(NoTransfer.__name__)(NoTransfer)


class Replica:
    """A replica with one worker, without a server: its part of verl's update takes no time."""

    def __init__(self, worker: Any):
        self.workers = [worker]

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        pass

    async def resume_generation(self) -> None:
        pass

    async def release_kv_cache(self) -> None:
        pass

    async def resume_kv_cache(self) -> None:
        pass


@dataclass(frozen=True)
class Cost:
    """Cost of one call of all ranks."""

    cpu_s: float
    """CPU time of the driver."""
    wall_s: float
    """Seconds until the last answer."""


def make_fragment(num_groups: int, group_size: int) -> FragmentSpec:
    """A fragment of complete groups with nine trained steps per sample."""
    samples = [
        FragmentSample(
            key=f"p{group:06d}_{index}_0",
            facts=SampleFacts(f"p{group:06d}", index, 7, 0, 0, 9, SAMPLING, f"c{group:06d}"),
            reward=0.5,
        )
        for group in range(num_groups)
        for index in range(group_size)
    ]
    return FragmentSpec("f0", tuple(samples))


def here(node: str, callees: Sequence[Callee]) -> Relayed:
    """Start a relay on this node, whatever node it is planned for."""
    return start_relay(ray.get_runtime_context().get_node_id(), callees)


def measure(work: Callable[[], object]) -> Cost:
    """Do the work once."""
    began_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return Cost(time.process_time() - cpu_s, time.perf_counter() - began_s)


def fragment_calls(ranks: Callee, fragment: FragmentSpec) -> Callable[[], object]:
    """Call `accumulate` of all ranks, as the trainer does."""

    async def call() -> None:
        await ranks.call(Work("accumulate", (ray.put(fragment),)), "first")

    return lambda: asyncio.run(call())


class Known(Route):
    """A route that is there already."""

    def __init__(self, way: Together):
        self._known = way

    def to(self, actors: Sequence[Any]) -> Together:
        return self._known


def updates(
    actors: Sequence[Any], ranks: Callee, receivers: Together
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A weight update by verl's manager, and by ours."""
    workers = [Replica(actors[number % len(actors)]) for number in range(receivers.num_processes)]
    config = SimpleNamespace(backend=NoTransfer.__name__, custom_backend_module=None)
    every_rank = [actors[number % len(actors)] for number in range(ranks.num_processes)]
    group = RayWorkerGroup(worker_handles=every_rank, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Bound)))
    verls: Any = CheckpointEngineManager(config, group, list(workers))
    ours = StagedCheckpointManager(config, group, list(workers), ranks=ranks, route=Known(receivers), load_s=60.0)
    return lambda: verls.update_weights(1), lambda: ours.stage_weights(1)


def widths(nodes: Sequence[str]) -> list[int]:
    """Callees of the driver, of the relays that it calls, and so on; the most of each level."""

    def of(callees: Sequence[Any]) -> list[int]:
        below = [of(callee.callees) for callee in callees if isinstance(callee, Together)]
        return [len(callees), *(max(level) for level in zip(*below, strict=True))]

    return of(relayed([Process(None)] * len(nodes), nodes, start=lambda node, callees: Together(callees)).callees)


def calls_of(callee: Callee, method: str) -> Callable[[], object]:
    """Call a method without arguments on all."""

    async def call() -> None:
        await callee.call(Work(method), "all")

    return lambda: asyncio.run(call())


def middle(costs: list[Cost], of: Callable[[Cost], float]) -> str:
    """Median in milliseconds, and the range."""
    values = [1e3 * of(cost) for cost in costs]
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def measure_all(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[Cost]]:
    """Measure the ways in turns, after a first turn that warms up."""
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, work in ways.items():
            cost = measure(work)
            costs[name] += [cost] if number else []
    return costs


def at_once(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """`widths` of a call of both trees at the same time: of the driver the sum, further down the larger."""
    first, *further = zip_longest(one, other, fillvalue=0)
    return [sum(first), *map(max, further)]


def print_waits(ranks: Sequence[Process], calls: dict[str, Sequence[int]], repeats: int) -> None:
    """Print the wait for the last answer where every caller has its own core.

    Args:
        calls: name of a call -> its `widths`.
    """
    counts = sorted({1, *(width for of in calls.values() for width in of)})
    ways = {str(count): calls_of(Together(ranks[:count]), "__ray_ready__") for count in counts}
    costs = measure_all(ways, 5 * repeats)
    cpu_ms = {count: 1e3 * median(cost.cpu_s for cost in costs[str(count)]) for count in counts}
    rest_ms = 1e3 * median(cost.wall_s - cost.cpu_s for cost in costs["1"])
    print(f"a caller of {', '.join(map(str, counts))}: {', '.join(f'{cpu_ms[count]:.1f}' for count in counts)} ms")
    print(f"the rest of a round trip: {rest_ms:.1f} ms\n")
    print("| call | callees of the driver, of a relay, ... | until the last answer, calculated, ms |")
    print("| --- | --- | --- |")
    for name, of in calls.items():
        wait_ms = sum(cpu_ms[width] + rest_ms for width in of)
        print(f"| {name} | {', '.join(map(str, of))} | {wait_ms:.0f} |")
    print()


def main() -> None:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=640)
    parser.add_argument("--workers", type=int, default=384)
    parser.add_argument("--per-node", type=int, default=8)
    parser.add_argument("--actors", type=int, default=4, help="processes that stand for the ranks (default: 4)")
    parser.add_argument("--groups", type=int, default=8, help="groups of the fragment (default: 8)")
    parser.add_argument("--group-size", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    ray.init(num_cpus=args.actors, include_dashboard=False)
    actors = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(args.actors)]
    ranks = [Process(actors[number % args.actors]) for number in range(args.ranks)]
    nodes_of_ranks, nodes_of_workers = (
        [f"n{number // args.per_node:04d}" for number in range(count)] for count in (args.ranks, args.workers)
    )
    of_ranks, of_servers = widths(nodes_of_ranks), widths(nodes_of_workers)
    calls = {
        "all ranks": of_ranks,
        "one of the four of a weight update": at_once(of_ranks, of_servers),
        "signs of life": at_once(of_servers, of_servers),
        "health": of_servers,
    }
    print_waits(ranks, calls, args.repeats)  # while the cores are free: before there are relays
    way = relayed(ranks, nodes_of_ranks, start=here)
    workers = [Process(actors[number % args.actors]) for number in range(args.workers)]
    receivers = relayed(workers, nodes_of_workers, start=here)
    fragment = make_fragment(args.groups, args.group_size)
    print(f"{args.ranks} ranks behind {len(way.callees)} relays of the driver, {args.workers} workers of replicas")
    by_verl, by_us = updates(actors, way, receivers)
    ways = {
        "a fragment": fragment_calls(Together(ranks), fragment),
        "a fragment, relays": fragment_calls(way, fragment),
        "a weight update": by_verl,
        "a weight update, relays": by_us,
        "signs of life": calls_of(Together([*workers, *workers]), "__ray_ready__"),
        "signs of life, relays": calls_of(Together([receivers, receivers]), "__ray_ready__"),  # servers are as many
        "health": calls_of(Together(workers), "check_health"),
        "health, relays": calls_of(receivers, "check_health"),
    }
    costs = measure_all(ways, args.repeats)
    print("| call | CPU time of the driver, ms | until the last answer, ms |")
    print("| --- | --- | --- |")
    for name, of in costs.items():
        print(f"| {name} | {middle(of, lambda cost: cost.cpu_s)} | {middle(of, lambda cost: cost.wall_s)} |")
    ray.shutdown()


if __name__ == "__main__":
    main()
