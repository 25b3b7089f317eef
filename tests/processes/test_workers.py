# SPDX-License-Identifier: Apache-2.0
"""Workers that die or stop, as real Ray actors."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnavailableError

from tests.reward.mortal import MortalWorker
from verl_digen.errors import RunStopped
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import RestartingActor, WorkerPool

pytestmark = pytest.mark.slow

MAX_RETRIES = 2
LARGE = b"x" * 200_000
"""Argument large enough that Ray puts it into its object store, like verl's config."""


def start(folder: Path, count: int, answer_s: float = 60.0, starts_s: float = 0.0, **options: int) -> WorkerPool:
    actor = RestartingActor(MortalWorker, MAX_RETRIES, num_cpus=0)
    return pool([actor.options(**options).remote(folder, LARGE, starts_s) for _ in range(count)], answer_s)


def pool(handles: list[Any], answer_s: float = 60.0, run: int = 1) -> WorkerPool:
    return WorkerPool(handles, DeadlinesConfig(answer_s=answer_s), kind="reward", key="workers", run=run)


def score(workers: WorkerPool, *samples: tuple[int, int], by: signal.Signals = signal.SIGKILL) -> list[object]:
    """Scores of samples (name, number of signals `by` that the worker gets on it first)."""

    async def run() -> list[object]:
        scores = [workers.call_together("score_all", (*sample, by)) for sample in samples]
        return await asyncio.gather(*scores, return_exceptions=True)

    return asyncio.run(run())


def test_a_worker_that_dies_comes_back_and_every_sample_has_its_own_score(ray_cluster, tmp_path):
    workers = start(tmp_path, 1)
    assert score(workers, (1, 0), (2, 1), (3, 0)) == [0.1, 0.2, 0.3]


def test_a_worker_that_stops_is_ended_and_comes_back_and_every_sample_has_its_own_score(ray_cluster, tmp_path, caplog):
    workers = start(tmp_path, 1, answer_s=3.0)
    assert score(workers, (1, 1), (2, 0), (3, 0), by=signal.SIGSTOP) == [0.1, 0.2, 0.3]
    assert "gives no sign of life" in caplog.text


@pytest.mark.long
def test_a_worker_that_takes_long_to_start_or_to_score_and_lives_is_waited_for(ray_cluster, tmp_path, caplog):
    assert score(start(tmp_path, 1, answer_s=2.0, starts_s=6.0), (60, 0)) == [6.0]
    assert "no sign of life" not in caplog.text


def test_a_sample_that_kills_whoever_scores_it_fails_alone(ray_cluster, tmp_path):
    workers = start(tmp_path, 1)
    (failed,) = score(workers, (1, 2 + MAX_RETRIES))  # once with others, if there are some, then alone
    assert isinstance(failed, ActorUnavailableError)
    assert score(workers, (2, 0)) == [0.2]


def test_samples_of_a_worker_gone_for_good_go_to_the_others_and_without_any_the_run_stops(ray_cluster, tmp_path):
    workers = start(tmp_path, 2, max_restarts=0)
    ray.kill(workers._living[0])
    assert score(workers, *[(number, 0) for number in range(8)]) == [number / 10 for number in range(8)]
    assert len(workers._living) == 1
    ray.kill(workers._living[0])
    (stopped,) = score(workers, (1, 0))
    assert isinstance(stopped, RunStopped) and "every reward worker is lost" in str(stopped)


def test_samples_go_to_a_worker_in_runs_of_its_batch_size_and_then_to_the_one_with_the_fewest():
    workers = pool(["a", "b", "c"], run=2)
    taken = [workers.take() for _ in range(6)]
    assert taken[0] == taken[1] != taken[2] == taken[3] != taken[4] == taken[5] and {*taken} == {"a", "b", "c"}
    for _ in range(2):
        workers.release(taken[2])
    assert workers.take() == taken[2]
    workers._living.remove(taken[2])
    assert workers.take() != taken[2], "a run ends with its worker"
