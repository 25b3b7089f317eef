# SPDX-License-Identifier: Apache-2.0
"""The garbage collector of the driver and the ranks, once a run has begun."""

import gc
from types import SimpleNamespace

import pytest
import ray
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.trainer.mortal import Process
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.trainer.disaggregated import DisaggregatedTrainer

pytestmark = pytest.mark.slow


class Trainer(DisaggregatedTrainer):
    """A trainer of which verl starts nothing."""

    __abstractmethods__ = frozenset()

    def __init__(self, ranks):
        self.digen = SimpleNamespace(deadlines=DeadlinesConfig())
        self.actor_rollout_wg = SimpleNamespace(workers=ranks)


@pytest.fixture
def collector():
    yield
    gc.unfreeze()


def num_frozen(actor):
    return gc.get_freeze_count()


@pytest.mark.long
def test_what_a_run_begins_with_is_left_alone_in_the_driver_and_in_every_rank(ray_cluster, monkeypatch, collector):
    ranks = [ray.remote(Process).options(num_cpus=0).remote() for _ in range(2)]
    started = []
    monkeypatch.setattr(PPOTrainer, "init", lambda self: started.append([object()]))
    Trainer(ranks).init()
    assert all(count > 1000 for count in ray.get([rank.__ray_call__.remote(num_frozen) for rank in ranks]))
    assert gc.get_freeze_count() > 1000
    assert not any(found is started[0] for found in gc.get_objects()), "what `init` made is exempt, too"
