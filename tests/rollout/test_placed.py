# SPDX-License-Identifier: Apache-2.0
import os

from verl_digen.rollout.birth import drop_launcher_variables
from verl_digen.rollout.placed import cpu_threads


def test_replicas_share_the_cores_with_those_that_compute_at_the_same_time(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert cpu_threads(num_neighbours=2, num_devices=2, is_standalone=True) == 4
    assert cpu_threads(num_neighbours=0, num_devices=1, is_standalone=False) == 16, "taking turns with the trainer"
    assert cpu_threads(num_neighbours=2, num_devices=4, is_standalone=False) == 4, "replicas work at the same time"
    assert cpu_threads(num_neighbours=16, num_devices=16, is_standalone=True) == 1


def test_a_replica_drops_the_process_group_of_the_job_that_started_ray(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "29500")
    drop_launcher_variables()
    assert "29500" not in os.environ.values()
