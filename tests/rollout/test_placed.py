# SPDX-License-Identifier: Apache-2.0
from verl_digen.rollout.placed import cpu_threads


def test_replicas_share_the_cores_with_those_that_compute_at_the_same_time(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    assert cpu_threads(num_neighbours=2, num_devices=2, is_standalone=True) == 4
    assert cpu_threads(num_neighbours=0, num_devices=1, is_standalone=False) == 16, "taking turns with the trainer"
    assert cpu_threads(num_neighbours=2, num_devices=4, is_standalone=False) == 4, "replicas work at the same time"
    assert cpu_threads(num_neighbours=16, num_devices=16, is_standalone=True) == 1
