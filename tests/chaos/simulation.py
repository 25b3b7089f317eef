# SPDX-License-Identifier: Apache-2.0
"""One run of a world: the project's trainer for separate pools, from its conductor down, on processes of `roles`.

Real: `step`, `on_step_end`, `on_validate_begin` and all they call (conductor, planner, pools, chunk runners, agent loop
workers, reward workers, replica updates), the prompts that a checkpoint holds, and the wait for a validation. Modelled:
verl's loop around them (`_fit`), the transfer of weights (`Sender`) and the files of a checkpoint (`Files`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import ray
import ray._private.state
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.router import GlobalRequestLoadBalancer

from tests.chaos.checks import Checks, Problem
from tests.chaos.faults import AGENT, ENGINE, QUEUE, RANK, REWARD, SERVER, Fault, Kind
from tests.chaos.loop import Stuck, VirtualLoop, who_waits
from tests.chaos.processes import Cluster, Handle
from tests.chaos.roles import Agent, Engine, Judge, Queue, QueueClient, Rank, RankGroup, Reward, Server, prompt_row
from tests.chaos.samples import BlankSamples
from tests.chaos.world import World, draw_world, smaller
from tests.trainer.direct import as_it_is
from verl_digen.agent_loop.server_manager import DiffusionServerClient
from verl_digen.data.rows import prompt_rows
from verl_digen.errors import RunStopped
from verl_digen.observe.timeline.interval import Lane
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.processes.deadlines import Deadlines
from verl_digen.processes.relays import Process, Together
from verl_digen.processes.supervision import Supervision
from verl_digen.store.keys import VAL
from verl_digen.store.samples import clear
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.trainer.replicas import required_processes
from verl_digen.trainer.updates import TrainerRanks
from verl_digen.trainer.validation import Validation
from verl_digen.types import PromptRow

RESTART_S = 5.0
"""Virtual seconds that the restart of a replica takes."""
MAX_SHRINK_RUNS = 400

VALIDATION_PROMPTS = ("val0", "val1")


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run."""

    world: World
    problems: tuple[Problem, ...]
    end: str
    """'whole', 'stopped: REASON', or how it failed."""
    struck: tuple[Fault, ...]
    """Faults whose call was made."""
    fingerprint: int
    """Hash of the calls in order, the time and the end: equal for equal runs."""
    waiting: tuple[str, ...] = field(default=(), compare=False)
    """Places where a stuck run waits: calls without an answer, then tasks."""


@dataclass(eq=False)
class Replica:
    """verl's `RolloutReplica`, as far as a run reads it."""

    server_address: str
    server_handle: Handle
    workers: list[Handle]
    rollout_mode: RolloutMode = RolloutMode.STANDALONE
    world_size: int = 1
    resource_pool: Any = field(default_factory=lambda: SimpleNamespace(pgs=()))

    @property
    def servers(self) -> list[Handle]:
        return [self.server_handle]


class Sender:
    """verl's checkpoint engine manager, with `StagedCheckpointManager`'s way to send weights."""

    def __init__(self, cluster: Cluster, ranks: RankGroup, replicas: Sequence[Replica]):
        self._cluster, self._ranks, self.replicas = cluster, ranks, list(replicas)

    def remove_replicas(self, replicas: Sequence[Replica]) -> None:
        self.replicas = [replica for replica in self.replicas if replica not in replicas]

    def add_replicas(self, replicas: Sequence[Replica]) -> None:
        self.replicas.extend(replicas)

    def update_weights(self, version: int) -> None:
        self.stage_weights(version)
        self._cluster.get([replica.server_handle.activate_weights.remote() for replica in self.replicas])

    def stage_weights(self, version: int) -> None:
        weights = self._cluster.get(self._ranks.update_weights(version))[0]
        workers = [worker for replica in self.replicas for worker in replica.workers]
        self._cluster.get([worker.update_weights.remote(version, weights) for worker in workers])


@dataclass(frozen=True)
class Saved:
    """A checkpoint, as far as the driver writes it; each part is read at the end of the saving, as the project does."""

    step: int
    num_drawn: int
    open_prompts: tuple[PromptRow, ...]
    began_s: float
    end_s: float


class Files(DiffusionTrainer):
    """Stands below `DisaggregatedTrainer`: a checkpoint takes virtual time and stays in memory."""

    world: World
    saved: list[Saved]

    def _save_checkpoint(self) -> None:
        began_s = self._recorder.now_s()  # type: ignore[attr-defined]
        time.sleep(self.world.save_s)  # the ranks write their shards
        found = (self.global_steps, self._num_prompts_drawn, tuple(self._open_prompts()))
        self.saved.append(Saved(*found, began_s, self._recorder.now_s()))  # type: ignore[attr-defined]


class Trainer(DisaggregatedTrainer, Files):
    """The project's trainer, made without verl's constructor, which starts Ray.

    Args:
        resumes: the checkpoint that it continues from.
    """

    def __init__(self, world: World, simulation: Simulation, resumes: Saved | None = None):
        self.world, self.simulation, self.digen = world, simulation, simulation.digen
        loop = simulation.loop
        self.config = OmegaConf.create(
            {
                "data": {"train_batch_size": world.num_prompts},
                "actor_rollout_ref": {
                    "actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 1}},
                    "rollout": {"n": world.group_size, "val_kwargs": {"n": 1}},
                },
                "trainer": {
                    **{"nnodes": 1, "n_gpus_per_node": world.num_ranks},
                    **{"default_local_dir": "unused", "logger": []},
                },
                "reward": {"reward_model": {"enable_resource_pool": False}},
                "digen": {},
            }
        )
        self.actor_rollout_wg = simulation.ranks
        self.agent_loop_manager = SimpleNamespace(agent_loop_workers=simulation.agents)
        self.checkpoint_manager = simulation.sender
        self.llm_server_manager = SimpleNamespace(global_load_balancer=simulation.balancer)
        self.total_training_steps, self.timing_raw = world.num_batches, {}
        self._reward_names = []
        self._recorder = Recorder(now_s=loop.time)
        self._driver = Lane("driver", 0, socket.gethostname(), 0)
        self._conductor = None
        self._num_devices = {"trainer": world.num_ranks, "generator": world.num_replicas}
        self._first, self._num_prompts_drawn, self._drawn = 1, 0, []
        if resumes is not None:
            self._first, self._num_prompts_drawn = resumes.step + 1, resumes.num_drawn
            self._drawn = list(resumes.open_prompts)
        self.saved = []
        self._condition_keys = set()
        self.global_steps = self._first
        self._rank_processes = Together([Process(one) for one in simulation.ranks.workers])
        self._ranks = TrainerRanks(self._rank_processes, put=as_it_is)
        self.run_dir = Path("unused")
        self._supervision = Supervision(
            Deadlines(self.digen.deadlines, self.digen.reward.score_s, world.compares),
            loop=loop,  # type: ignore[arg-type] - has the methods of a LoopThread
            step=lambda: self.global_steps,
            end_silent_replicas=lambda: self._replicas.end_silent(),
            end_all=self._end_all,
            cancel_queue_calls=simulation.queue_client.cancel_calls,
        )
        self._validation = Validation(self.config, self.digen, self._supervision, poll_s=2.0)
        self._validation.replace_all_lost = self._count_replaced

    async def _start_replica(self, number: int) -> Replica:
        return await self.simulation.restart_replica(number)

    def _draw_batch(self) -> list[PromptRow]:
        first = self._num_prompts_drawn
        self._num_prompts_drawn += self.world.num_prompts
        return [prompt_row(f"p{number:04d}") for number in range(first, self._num_prompts_drawn)]

    def _draw_prompts(self, batch: int, count: int) -> list[str]:
        uids = super()._draw_prompts(batch, count)
        self.simulation.checks.drawn |= dict.fromkeys(uids, batch)
        return uids

    def _close_timeline(self) -> None:
        """Do nothing: there is no timeline."""

    def run(self) -> None:
        """Run like `DiffusionTrainer.fit`, with a loop over steps in place of verl's."""
        with self._supervision.ends_explained():
            self._supervision.watch_processes(required_processes(self.simulation.agents))
            self._fit()

    def _fit(self) -> None:
        for step in range(self._first, self.world.num_batches + 1):
            self.global_steps = step
            self._step_began_s = self._recorder.now_s()
            batch = self.step({}, self.timing_raw)
            if step in self.world.saves:
                self._save_checkpoint()
            self.on_step_end()
            if step in self.world.validates:
                self.on_validate_begin()
                self._validate_some()
            self._replicas.metrics(published=step)
            clear(batch.partition_id, batch.keys)
        self.on_validate_begin()  # drains all work in flight

    def _count_replaced(self) -> bool:
        replaced = self._replace_all_lost()
        self.simulation.replaced += replaced
        return replaced

    def _validate_some(self) -> None:
        """Validate like `_validate`, without pictures and a data loader."""
        checks, agents = self.simulation.checks, self.simulation.agents
        checks.validating |= dict.fromkeys(VALIDATION_PROMPTS, self.global_steps)

        def generate(batch: Any) -> None:
            ray.get(
                [
                    agents[number % len(agents)].validate.remote(row.uid, self.global_steps)  # type: ignore[list-item]
                    for number, row in enumerate(prompt_rows(batch))
                ]
            )

        rows = [prompt_row(uid) for uid in VALIDATION_PROMPTS]
        self.simulation.unvalidated += self._validation.generate(rows, generate, self.global_steps, {})


class Simulation:
    """All processes of a world, and the trainer."""

    def __init__(self, world: World, resumes: Saved | None = None):
        self.loop = VirtualLoop()
        self.cluster = cluster = Cluster(self.loop, world.seed, world.faults)
        self.checks = checks = Checks(world.group_size, world.num_ranks, world.max_versions)
        self.digen = digen = world.digen()
        samples = self._samples = BlankSamples(digen)
        self._version = 0 if resumes is None else resumes.step
        self.num_restarts = 0
        """Replicas that were started in place of lost ones."""
        self.unvalidated: list[str] = []
        """Reasons why validation prompts failed."""
        self.replaced = 0
        """Times that a validation lost every replica and went on."""
        self.queue = Queue()
        self.queue_client = QueueClient(cluster, cluster.start(f"{QUEUE} 0", self.queue, "TransferQueueController"))
        self.rank_targets = [
            Rank(cluster, number, world.num_ranks, self.queue, samples, checks) for number in range(world.num_ranks)
        ]
        for rank in self.rank_targets:
            rank.num_commits = self._version
        self.ranks = RankGroup([cluster.start(f"{RANK} {n}", rank) for n, rank in enumerate(self.rank_targets)])
        rewards = [cluster.start(f"{REWARD} {n}", Reward(cluster, f"{REWARD} {n}")) for n in range(world.num_rewards)]
        judges = [cluster.start("judge", Judge(cluster, "judge", checks))] if world.compares else []
        replicas = [self._start_replica(number, samples) for number in range(world.num_replicas)]
        self.sender = Sender(cluster, self.ranks, replicas)
        self.balancer = cluster.start(
            "balancer 0",
            GlobalRequestLoadBalancer({replica.server_address: replica.server_handle for replica in replicas}),
        )
        self.agents = []
        for number in range(world.num_agents):
            client = DiffusionServerClient(None, self.balancer)  # type: ignore[arg-type]
            client.__dict__["digen"] = digen  # a cached property, of a config that is not there
            agent = Agent(client, digen, rewards, judges, world.group_size)
            self.agents.append(cluster.start(f"{AGENT} {number}", agent))
        self.trainer = Trainer(world, self, resumes)

    def _start_replica(self, number: int, samples: BlankSamples) -> Replica:
        name = f"{SERVER} {number}"
        server = Server(self.cluster, name, self.digen, samples, self.checks, version=self._version)
        handle = self.cluster.start(name, server)
        return Replica(
            name, handle, [self.cluster.start(f"{ENGINE} {number}", Engine(name, self.digen.deadlines.blip_s))]
        )

    async def restart_replica(self, number: int) -> Replica:
        """A replica in place of a lost one: its processes take a while to start."""
        await asyncio.sleep(RESTART_S)
        self.num_restarts += 1
        return self._start_replica(number, self._samples)

    def watch_outcomes(self) -> None:
        """Have every outcome of the conductor checked."""
        make = self.trainer._make_conductor

        def make_watched() -> Any:
            conductor = make()
            run_batch = conductor.run_batch

            async def watched() -> Any:
                outcome = await run_batch()
                if outcome is not None:
                    self.checks.on_outcome(outcome.report.batch, outcome, conductor.planner.rules)
                return outcome

            conductor.run_batch = watched  # type: ignore[method-assign]
            return conductor

        self.trainer._make_conductor = make_watched  # type: ignore[method-assign]

    def left(self) -> dict[str, list[str]]:
        """Partition -> keys that are left in the queue and that the next outcome would not return for clearing."""
        conductor = self.trainer._conductor
        assert conductor is not None
        late = self.trainer._condition_keys & self.trainer._generator.condition_keys()
        for published in conductor._published.values():
            late |= published.condition_keys | {name.key for name in published.names}
        partitions = self.queue.partitions.items()
        return {name: [key for key in rows if key not in late] for name, rows in partitions if name != VAL}


@contextmanager
def in_place_of_ray(simulation: Simulation) -> Iterator[None]:
    """Replace Ray, TransferQueue and the clock of the main thread by the simulation's."""
    client, cluster = simulation.queue_client, simulation.cluster
    functions: list[tuple[Any, Sequence[str], Any]] = [
        (ray, ("get", "get_actor", "kill", "nodes"), cluster),
        (ray._private.state, ("actors",), cluster),
        (ray.util, ("list_named_actors",), cluster),
        (tq, ("async_kv_put", "async_kv_batch_put", "async_kv_clear", "kv_batch_put", "kv_clear", "kv_list"), client),
    ]
    patches = [
        mock.patch.object(module, name, getattr(ours, name)) for module, names, ours in functions for name in names
    ]
    patches += [mock.patch("time.sleep", cluster.sleep)]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def simulate(world: World, change: Callable[[Simulation], None] | None = None, resumes: Saved | None = None) -> Verdict:
    """Run a world to its end.

    Args:
        change: breaks or watches something before the run begins.
        resumes: the checkpoint that the run continues from.
    """
    random.seed(world.seed)  # verl's balancer and the reward workers draw from the module's generator
    simulation = Simulation(world, resumes)
    simulation.watch_outcomes()
    if change is not None:
        change(simulation)
    checks, cluster, loop = simulation.checks, simulation.cluster, simulation.loop
    waiting: tuple[str, ...] = ()
    with in_place_of_ray(simulation):
        try:
            simulation.trainer.run()
            end = "whole"
            checks.on_end(simulation.left())
        except RunStopped as error:
            end = f"stopped: {error}"
            _check_stop(simulation, world, str(error))
        except Stuck as error:
            end = f"stuck: {error}"
            waiting = (*(f"no answer: {call}" for call in cluster.unanswered()), *who_waits(loop))
            checks.note("stuck", end)
        except Exception as error:
            end = f"crashed: {type(error).__name__}: {error}"
            checks.note("crashed", end)
        with suppress(Stuck):
            loop.close()
    calls = [(name, sorted(process.num_calls.items())) for name, process in sorted(cluster.processes.items())]
    fingerprint = crc32(repr((calls, loop.time(), end)).encode())
    return Verdict(world, tuple(checks.problems), end, tuple(cluster.struck), fingerprint, waiting)


def _check_stop(simulation: Simulation, world: World, reason: str) -> None:
    """Check a run that stopped: its faults allow that, and the trainer's gradient was discarded."""
    checks, cluster = simulation.checks, simulation.cluster
    if not may_end(world, cluster.struck):
        checks.note("crashed", f"stopped without need: {reason}")
    if any(fault.process_kind == RANK for fault in cluster.struck):
        return  # a rank that failed need not answer
    checks.require(
        not any(rank.holds_gradient for rank in simulation.rank_targets), "leaked", "a gradient is left open"
    )


def may_end(world: World, struck: Sequence[Fault]) -> bool:
    """True if a run in which these faults struck may stop before its last batch; the project's promises:

    | fault | promise |
    | --- | --- |
    | slow, done twice | the run goes on |
    | a generation or a scoring raises | the run goes on: the sample is retried |
    | something else raises, e.g. a replica refuses weights | the run may end: it would do so again |
    | a replica, its checkpoint worker or a reward worker fails otherwise | the run goes on while another one is left |
    | a rank, an agent loop worker or TransferQueue fails | the run may end |
    """
    harmful = [fault for fault in struck if not _is_harmless(fault)]
    replicas = {fault.process.split()[1] for fault in harmful if fault.process_kind in (SERVER, ENGINE)}
    rewards = {fault.process for fault in harmful if fault.process_kind == REWARD}
    return (
        len(replicas) == world.num_replicas
        or len(rewards) == world.num_rewards
        or any(fault.kind is Kind.RAISES or fault.process_kind in (RANK, AGENT, QUEUE) for fault in harmful)
    )


def _is_harmless(fault: Fault) -> bool:
    if fault.kind is Kind.RAISES:
        return fault.method in ("generate_all", "score")
    return fault.kind in (Kind.SLOW, Kind.TWICE)


def shrink(failed: Verdict) -> Verdict:
    """Find the smallest world with a problem of a kind that `failed` has; returns its verdict."""
    kinds, num_runs, candidates = {problem.kind for problem in failed.problems}, 0, smaller(failed.world)
    while (world := next(candidates, None)) is not None and num_runs < MAX_SHRINK_RUNS:
        num_runs += 1
        verdict = simulate(world)
        if kinds & {problem.kind for problem in verdict.problems}:
            failed, candidates = verdict, smaller(verdict.world)
    return failed


def run_world(seed: int) -> Verdict:
    """Simulate the world of a seed."""
    return simulate(draw_world(seed))


def be_quiet() -> None:
    """Silence the project's messages about intended faults, and libraries' messages about other libraries."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
