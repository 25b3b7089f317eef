# SPDX-License-Identifier: Apache-2.0
"""A weight update, verl's protocol of checkpoint engines, against processes whose calls are coroutines."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError

from verl_digen.processes.relays import Process, Route, Together
from verl_digen.trainer.staged import StagedCheckpointManager

BACKEND = "digen_gloo"


class Worker:
    """A rank or a replica's worker: takes note of its calls, each of which takes a moment."""

    def __init__(self, name, log, fails=""):
        self.name, self.log, self.fails = name, log, fails
        self.execute_checkpoint_engine = SimpleNamespace(remote=self._execute)
        self.update_weights = SimpleNamespace(remote=self._update)

    def _execute(self, method, **kwargs):
        return self._note(method, kwargs)

    def _update(self, **kwargs):
        return self._note("update", kwargs)

    async def _note(self, method, kwargs):
        await asyncio.sleep(0)
        self.log.append((self.name, method, kwargs))
        if method == self.fails:
            raise ActorDiedError()
        return f"metadata of {self.name}"


class Replica:
    """A replica, as far as an update is concerned."""

    def __init__(self, workers):
        self.workers = workers


class Engine:
    """The class of a checkpoint engine; keeps what it is asked."""

    metadata = None
    num_given = 0
    """Values too many for the ranks."""

    @classmethod
    def build_topology(cls, num_ranks, num_receivers, metadata):
        cls.metadata = metadata
        ranks = {"rank": [0, *[-1] * (num_ranks - 1 + cls.num_given)]}
        return ranks, {"rank": [1 + number for number in range(num_receivers)], "source": ["x"] * num_receivers}


def manager_of(workers, *, num_ranks, per_replica):
    config = SimpleNamespace(backend=BACKEND, custom_backend_module="verl_digen.weights.gloo")
    rest, replicas = workers[num_ranks:], []
    for count in per_replica:
        replicas.append(Replica(rest[:count]))
        rest = rest[count:]
    ranks = Together([Process(worker) for worker in workers[:num_ranks]])
    manager = StagedCheckpointManager(config, None, replicas, ranks=ranks, route=Route(1.0), load_s=1.0)
    manager.backend_cls = Engine
    return manager


@pytest.fixture
def log():
    Engine.metadata, Engine.num_given = None, 0
    return []


def workers_of(log, **fails):
    return [Worker(name, log, fails.get(name, "")) for name in ("t0", "t1", "a0", "b0", "b1")]


def test_every_process_joins_the_group_before_one_sends_and_has_its_own_rank(log):
    manager = manager_of(workers_of(log), num_ranks=2, per_replica=(1, 2))
    manager.stage_weights(7)
    assert Engine.metadata == [f"metadata of {name}" for name in ("t0", "t1", "a0", "b0", "b1")]
    phases = [sorted(log[first : first + 5], key=lambda call: call[0]) for first in range(0, len(log), 5)]
    assert [{method for _, method, _ in phase} for phase in phases] == [
        *({"prepare"}, {"init_process_group"}, {"update"}, {"finalize"})
    ]
    assert {name: kwargs for name, _, kwargs in phases[1]} == {
        "t0": {"rank": 0},
        "t1": {"rank": -1},
        "a0": {"rank": 1, "source": "x"},
        "b0": {"rank": 2, "source": "x"},
        "b1": {"rank": 3, "source": "x"},
    }
    sends, receives = {"global_steps": 7, "mode": BACKEND}, {"global_steps": 7}
    assert {name: kwargs for name, _, kwargs in phases[2]} == {
        **dict.fromkeys(("t0", "t1"), sends),
        **dict.fromkeys(("a0", "b0", "b1"), receives),
    }


def test_a_death_in_the_transfer_is_raised_and_the_next_update_is_without_that_replica(log):
    manager = manager_of(workers_of(log, b0="update"), num_ranks=2, per_replica=(1, 2))
    with pytest.raises(ActorDiedError):
        manager.stage_weights(7)
    assert not any(method == "finalize" for _, method, _ in log)
    log.clear()
    manager.remove_replicas([manager.replicas[1]])
    manager.stage_weights(7)
    assert sorted({name for name, _, _ in log}) == ["a0", "t0", "t1"]
    log.clear()
    manager.add_replicas([Replica([Worker("c0", log)])])
    manager.stage_weights(8)
    assert sorted({name for name, _, _ in log}) == ["a0", "c0", "t0", "t1"]


def test_a_topology_of_another_size_is_refused(log):
    Engine.num_given = 1
    manager = manager_of(workers_of(log), num_ranks=2, per_replica=(1, 2))
    with pytest.raises(ValueError, match="argument 2 is longer"):
        manager.stage_weights(7)
