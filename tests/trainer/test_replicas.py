# SPDX-License-Identifier: Apache-2.0
"""Replicas that die, as real Ray actors, under a stand-in for verl's managers."""

from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError
from verl.workers.rollout.replica import RolloutMode

from tests.trainer.mortal import Balancer, Process
from verl_digen.errors import RunStopped
from verl_digen.trainer.replicas import update_living_replicas

pytestmark = pytest.mark.slow


class Managers:
    """What `update_living_replicas` uses of verl's checkpoint manager and server manager."""

    def __init__(self, count, mode=RolloutMode.STANDALONE):
        process = ray.remote(Process).options(num_cpus=0)
        self.replicas = [
            SimpleNamespace(
                server_handle=process.remote(),
                workers=[process.remote()],
                server_address=f"r{number}",
                rollout_mode=mode,
            )
            for number in range(count)
        ]
        self.global_load_balancer = ray.remote(Balancer).options(num_cpus=0).remote()
        self.updates = []
        ray.get([process.version_now.remote() for replica in self.replicas for process in processes(replica)])

    def remove_replicas(self, lost):
        self.replicas = [replica for replica in self.replicas if replica not in lost]

    def update(self, version, kill=None):
        """Send weights to all replicas' workers; `kill` dies while they travel."""
        self.updates.append([replica.server_address for replica in self.replicas])
        if kill is not None and len(self.updates) == 1:
            kill.die.remote()
        ray.get([process.take.remote(version) for replica in self.replicas for process in processes(replica)])


def processes(replica):
    return replica.server_handle, *replica.workers


@pytest.fixture(scope="module")
def ray_here():
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def update(managers, version, kill=None):
    update_living_replicas(managers, managers, lambda: managers.update(version, kill))
    ours = [process for replica in managers.replicas for process in processes(replica)]
    assert set(ray.get([process.version_now.remote() for process in ours])) == {version}
    return [replica.server_address for replica in managers.replicas]


def test_a_replica_that_died_before_an_update_is_not_sent_one(ray_here):
    managers = Managers(3)
    ray.kill(managers.replicas[1].server_handle)
    assert update(managers, 1) == ["r0", "r2"]
    assert managers.updates == [["r0", "r2"]]
    assert ray.get(managers.global_load_balancer.all_removed.remote()) == ["r1"]


@pytest.mark.parametrize("part", [0, 1], ids=["server", "worker"])
def test_when_a_replica_dies_in_an_update_the_others_get_it_again(ray_here, part):
    managers = Managers(2)
    assert update(managers, 1, kill=processes(managers.replicas[0])[part]) == ["r1"]
    assert managers.updates == [["r0", "r1"], ["r1"]]


def test_the_workers_of_a_colocated_replica_are_the_trainers_ranks_and_say_nothing_about_it(ray_here):
    managers = Managers(1, RolloutMode.HYBRID)
    ray.kill(managers.replicas[0].workers[0])
    update_living_replicas(managers, managers, lambda: None)
    assert len(managers.replicas) == 1


def test_an_update_that_fails_while_all_replicas_live_is_an_error(ray_here):
    managers = Managers(1)
    with pytest.raises(RayActorError):
        update_living_replicas(managers, managers, raise_dead)


def raise_dead():
    raise RayActorError()


def test_without_a_replica_the_run_stops(ray_here):
    managers = Managers(1)
    with pytest.raises(RunStopped, match="every rollout replica is lost"):
        update(managers, 1, kill=managers.replicas[0].server_handle)
