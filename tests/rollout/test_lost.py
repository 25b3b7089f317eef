# SPDX-License-Identifier: Apache-2.0
"""A trainer rank's handle of a replica that is out of reach, dies, and is replaced, in virtual time."""

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError

from tests.chaos.loop import run_in_virtual_time
from verl_digen.rollout.lost import ReplicaHandle


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
