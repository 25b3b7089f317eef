# SPDX-License-Identifier: Apache-2.0
"""Replicas that die, as real Ray actors, under fakes of verl's managers."""

import asyncio
import os
import signal
import socket
from contextlib import suppress
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray.exceptions import RayActorError
from verl.workers.rollout.replica import RolloutMode

from tests.trainer.ended import assert_ends, kill
from tests.trainer.mortal import Balancer, Process
from verl_digen.errors import RunStopped
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.relays import FAN_OUT, Route
from verl_digen.trainer.replicas import Replicas
from verl_digen.trainer.timelines import hosts_of

pytestmark = pytest.mark.slow

DEADLINES = DeadlinesConfig(answer_s=20.0)
SHORT_DEADLINES = DeadlinesConfig(answer_s=3.0)
"""For processes that never answer: a test waits for all of it."""


class Managers:
    """The parts of verl's checkpoint manager and server manager that `Replicas` uses.

    Args:
        processes: a server and a worker in turn.
        times: replicas that have the same two processes.
    """

    def __init__(self, balancer, processes, mode=RolloutMode.STANDALONE, times=1):
        self.replicas = [
            SimpleNamespace(
                server_handle=server,
                servers=[server],
                workers=[worker],
                server_address=f"r{number}",
                rollout_mode=mode,
                resource_pool=SimpleNamespace(pgs=[]),
            )
            for number, (server, worker) in enumerate(zip(processes[::2] * times, processes[1::2] * times, strict=True))
        ]
        self.global_load_balancer = balancer
        self.updates = []

    def remove_replicas(self, lost):
        self.replicas = [replica for replica in self.replicas if replica not in lost]

    def update(self, version, kill=None):
        """Send weights to all replicas' workers; `kill` dies during the transfer."""
        self.updates.append([replica.server_address for replica in self.replicas])
        if kill is not None and len(self.updates) == 1:
            kill.die.remote()
        ray.get([process.take.remote(version) for replica in self.replicas for process in processes(replica)])


def processes(replica):
    return replica.server_handle, *replica.workers


class Processes:
    """Living processes. To start one takes a second, so those that survive a test serve the next."""

    def __init__(self):
        self.balancer = ray.remote(Balancer).options(num_cpus=0).remote()
        self.living = []

    def managers(self, count, **options):
        """Managers of `count` replicas at version 0, none of which is lost."""
        ours, self.living = self.living[: 2 * count], self.living[2 * count :]
        ours += [ray.remote(Process).options(num_cpus=0).remote() for _ in range(2 * count - len(ours))]
        ray.get([self.balancer.forget.remote(), *(process.take.remote(0) for process in ours)])
        return Managers(self.balancer, ours, **options)

    def take_back(self, managers):
        """Take back the living processes of the remaining replicas; others may be about to die."""
        for process in [process for replica in managers.replicas for process in processes(replica)]:
            with suppress(RayActorError):
                ray.get(process.version_now.remote(), timeout=60)
                self.living.append(process)


@pytest.fixture(scope="module")
def all_processes(ray_cluster):
    return Processes()


@pytest.fixture
def start(all_processes):
    """start(number of replicas, **options of `Managers`): the managers of real processes."""
    started = []

    def begin(count, **options):
        started.append(all_processes.managers(count, **options))
        return started[-1]

    yield begin
    for managers in started:
        all_processes.take_back(managers)


def test_the_lane_of_actors_has_the_name_of_their_node_also_if_they_do_not_answer(start, caplog):
    managers = start(1)
    actors = processes(managers.replicas[0])
    assert hosts_of("the ranks", actors, 20.0) == socket.gethostname() and not caplog.records
    kill(actors[1])
    assert hosts_of("the ranks", actors, 20.0) == socket.gethostname() and "do not say which node" in caplog.text


def replicas_of(managers, deadlines=DEADLINES, route=None):
    loop, route = SimpleNamespace(run=asyncio.run), route or Route(deadlines.answer_s)
    return Replicas(managers, managers, deadlines, loop, workers=route, start=None, max_restarts=0)


def update(managers, version, kill=None, deadlines=DEADLINES):
    replicas_of(managers, deadlines).tell_living(lambda: managers.update(version, kill))
    ours = [process for replica in managers.replicas for process in processes(replica)]
    assert set(ray.get([process.version_now.remote() for process in ours])) == {version}
    return [replica.server_address for replica in managers.replicas]


def test_a_replica_that_died_before_an_update_is_not_sent_one(start):
    managers = start(3)
    kill(managers.replicas[1].server_handle)
    assert update(managers, 1) == ["r0", "r2"]
    assert managers.updates == [["r0", "r2"]]
    assert ray.get(managers.global_load_balancer.all_removed.remote()) == ["r1"]


@pytest.mark.parametrize("part", [0, 1], ids=["server", "worker"])
def test_when_a_replica_dies_in_an_update_the_others_get_it_again(start, part):
    managers = start(2)
    assert update(managers, 1, kill=processes(managers.replicas[0])[part]) == ["r1"]
    assert managers.updates == [["r0", "r1"], ["r1"]]


def test_the_workers_of_a_colocated_replica_are_the_trainers_ranks_and_say_nothing_about_it(start):
    managers = start(1, mode=RolloutMode.HYBRID)
    kill(managers.replicas[0].workers[0])
    replicas_of(managers).tell_living(lambda: None)
    assert len(managers.replicas) == 1


def test_an_update_that_fails_while_all_replicas_live_is_an_error(start):
    managers = start(1)
    with pytest.raises(RayActorError):
        replicas_of(managers).tell_living(raise_dead)


def raise_dead():
    raise RayActorError()


def test_without_a_replica_the_run_stops(start):
    managers = start(1)
    with pytest.raises(RunStopped, match="every rollout replica is lost"):
        update(managers, 1, kill=managers.replicas[0].server_handle)


@pytest.mark.long
def test_replicas_of_which_a_process_is_stopped_are_left_out_and_all_of_their_processes_are_ended(start):
    managers = start(3)
    stopped = [process for replica in managers.replicas[:2] for process in processes(replica)]
    ids = ray.get([process.process_id.remote() for process in stopped])
    server, _, _, worker = ids
    os.kill(server, signal.SIGSTOP)
    os.kill(worker, signal.SIGSTOP)
    assert update(managers, 1, deadlines=SHORT_DEADLINES) == ["r2"]
    for process in stopped:
        with pytest.raises(RayActorError):
            ray.get(process.version_now.remote(), timeout=60)
    psutil.wait_procs([psutil.Process(pid) for pid in ids if psutil.pid_exists(pid)], timeout=60)
    assert not any(map(psutil.pid_exists, ids)), "their devices are free"


def test_a_version_that_a_replica_has_not_received_is_an_error(start):
    replicas = replicas_of(start(1))
    assert replicas.metrics(published=0)["rollout/version_lag_max_versions"] == 0.0
    with pytest.raises(RuntimeError, match="version 1 was published and replica r0 has received 0"):
        replicas.metrics(published=1)


def test_metrics_leave_out_a_replica_that_died_since_the_update(start):
    managers = start(2)
    kill(managers.replicas[0].server_handle)
    replicas = replicas_of(managers)
    metrics = replicas.metrics(published=0)
    assert metrics["rollout/num_replicas"] == 1.0 and metrics["rollout/prompt_cache_hit_rate"] == 0.75
    kill(managers.replicas[1].server_handle)
    assert replicas.metrics(published=0) == {"rollout/num_replicas": 0.0, "rollout/num_restarts": 0.0}


def test_many_replicas_are_asked_through_relays_and_one_that_died_is_found_as_among_few(start, caplog):
    managers = start(2, times=FAN_OUT)
    alike, others = ([f"r{number}" for number in range(first, 2 * FAN_OUT, 2)] for first in (0, 1))
    assert update(managers, 1) == sorted([*alike, *others], key=lambda address: int(address[1:]))
    replicas = replicas_of(managers)
    assert replicas.metrics(published=1)["rollout/num_replicas"] == 2.0 * FAN_OUT
    assert not caplog.records, "nothing failed: none was asked by itself"
    kill(managers.replicas[0].workers[0])
    assert update(managers, 2) == others
    assert "each is asked by itself" in caplog.text


def test_where_a_relay_died_each_replica_is_asked_by_itself_and_then_there_are_new_relays(start, caplog):
    managers, route = start(2, times=FAN_OUT), Route(DEADLINES.answer_s)
    replicas = replicas_of(managers, route=route)
    assert not replicas.forget_lost() and not caplog.records
    workers = [worker for replica in managers.replicas for worker in replica.workers]
    kill(route.to(workers).callees[0].relay)
    assert not replicas.forget_lost() and "each is asked by itself" in caplog.text
    caplog.clear()
    assert not replicas.forget_lost() and not caplog.records


def test_at_the_end_of_a_run_processes_and_relays_end(all_processes):
    ours = [ray.remote(Process).options(num_cpus=0).remote() for _ in range(2)]
    managers, route = Managers(all_processes.balancer, ours, times=2 * FAN_OUT), Route(DEADLINES.answer_s)
    replicas = replicas_of(managers, route=route)
    relays = [callee.relay for callee in route.to([replica.workers[0] for replica in managers.replicas]).callees]
    assert relays
    replicas.end_all()
    for actor in (*relays, *ours):
        assert_ends(actor)
