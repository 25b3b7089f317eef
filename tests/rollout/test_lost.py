# SPDX-License-Identifier: Apache-2.0
"""A trainer rank's handle of a replica that is out of reach, dies, and is replaced, in virtual time."""

import os
from types import SimpleNamespace

import ray
import torch
from ray.exceptions import ActorDiedError, ActorUnavailableError
from verl.checkpoint_engine.base import CheckpointEngineWorker
from verl.workers.rollout.replica import RolloutMode

from tests.chaos.loop import run_in_virtual_time
from verl_digen.rollout import birth
from verl_digen.rollout.birth import ReplicaWorker, cpu_threads, drop_launcher_variables
from verl_digen.rollout.replica import ReplicaHandle


class Server:
    """An actor handle whose `seal` fails with `errors` first, one after the other."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.num_calls = 0

    @property
    def seal(self):
        return self

    async def remote(self, number):
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return number + 1


class Cluster:
    """Ray's names and `ray.kill`."""

    def __init__(self, monkeypatch, server):
        self.server, self.killed = server, []
        monkeypatch.setattr(ray, "get_actor", self.get_actor)
        monkeypatch.setattr(ray, "kill", self.killed.append)

    def get_actor(self, name):
        if self.server is None:
            raise ValueError(name)
        return self.server


def away():
    return ActorUnavailableError("it restarts its connection", None)


def test_a_server_that_is_out_of_reach_for_a_moment_is_asked_again(monkeypatch):
    cluster = Cluster(monkeypatch, Server(away(), away()))
    handle = ReplicaHandle("replica", blip_s=30.0)
    assert run_in_virtual_time(handle.call("seal", 3)) == 4
    assert cluster.server.num_calls == 3 and not handle.is_lost and not cluster.killed


def test_a_server_that_stays_out_of_reach_is_killed_because_it_would_miss_weights(monkeypatch):
    cluster = Cluster(monkeypatch, Server(*(away() for _ in range(1000))))
    handle = ReplicaHandle("replica", blip_s=30.0)
    assert run_in_virtual_time(handle.call("seal", 3)) is None
    assert handle.is_lost and cluster.killed == [cluster.server]


def test_a_dead_server_is_not_asked_again_until_another_one_has_its_name(monkeypatch):
    dead = Server(ActorDiedError())
    cluster = Cluster(monkeypatch, dead)
    handle = ReplicaHandle("replica", blip_s=30.0)
    assert run_in_virtual_time(handle.call("seal", 3)) is None
    handle.find_successor()
    assert run_in_virtual_time(handle.call("seal", 3)) is None and dead.num_calls == 1
    cluster.server = None
    handle.find_successor()
    assert handle.is_lost and not cluster.killed
    cluster.server = Server()
    handle.find_successor()
    assert run_in_virtual_time(handle.call("seal", 3)) == 4


def test_replicas_share_the_cores_with_those_that_compute_at_the_same_time(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    standalone, hybrid = RolloutMode.STANDALONE, RolloutMode.HYBRID
    assert cpu_threads(2, 2, standalone) == 4
    assert cpu_threads(0, 1, hybrid) == 16, "taking turns with the trainer"
    assert cpu_threads(2, 4, hybrid) == 4, "replicas work at the same time"
    assert cpu_threads(16, 16, standalone) == 1
    monkeypatch.setattr("verl_digen.rollout.birth.get_platform", lambda: SimpleNamespace(device_name="cuda"))
    assert cpu_threads(2, 2, standalone) == 0, "an accelerator computes: torch's default"


def test_a_replica_drops_the_process_group_of_the_job_that_started_ray(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "29500")
    drop_launcher_variables()
    assert "29500" not in os.environ.values()


def test_a_replicas_worker_allocates_memory_that_its_server_may_open(monkeypatch):
    """Not in expandable segments, for which PYTORCH_CUDA_ALLOC_CONF may ask."""
    told = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *args, **kwargs: None)
    monkeypatch.setattr(CheckpointEngineWorker, "__init__", lambda worker: told.append("made"))
    monkeypatch.setattr(birth, "set_expandable_segments", told.append)
    ReplicaWorker()
    assert told == [False, "made"]
