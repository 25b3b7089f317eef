# SPDX-License-Identifier: Apache-2.0
"""The report of a run that goes on: when it is written, and that a failure is told and harms nothing."""

import json
import logging
import subprocess
import sys
from concurrent.futures import TimeoutError
from types import SimpleNamespace

import pytest
from ray.exceptions import RayTaskError
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from tests.report.runs import make_run
from tests.tags import make_tag
from verl_digen.observe.run_files import REPORT
from verl_digen.report.page import refresh_report
from verl_digen.trainer import run_output
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.run_output import MAX_SHARE, MIN_INTERVAL_S, RunReport


class Clock:
    now_s = 100.0


class Tasks:
    """Tasks that are done when `is_done` says so, after `spent_s`, or with `error`."""

    def __init__(self):
        self.begun, self.is_done, self.spent_s, self.waited_s = 0, True, 1.0, []
        self.error: Exception | None = None

    def future(self):
        self.begun += 1
        return self

    def done(self):
        return self.is_done

    def result(self, wait_s):
        self.waited_s.append(wait_s)
        if self.error is not None:
            raise self.error
        return self.spent_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def tasks():
    return Tasks()


@pytest.fixture
def report(tmp_path, tasks, clock, monkeypatch):
    monkeypatch.setattr(run_output, "begin_beside", lambda work, run_dir: tasks.future())
    monkeypatch.setattr(run_output, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    return RunReport(tmp_path, wait_s=7.0)


def test_it_is_written_at_most_once_a_minute_and_at_the_end(report, tasks, clock):
    report.refresh()
    clock.now_s += MIN_INTERVAL_S - 1
    report.refresh()
    assert tasks.begun == 1
    clock.now_s += 1
    report.refresh()
    assert tasks.begun == 2
    report.finish()
    assert tasks.begun == 3 and tasks.waited_s == [7.0, 7.0, 7.0]


def test_a_report_that_takes_long_is_written_less_often(report, tasks, clock):
    tasks.spent_s = 10.0
    report.refresh()
    began_s = clock.now_s
    clock.now_s = began_s + tasks.spent_s / MAX_SHARE - 1
    report.refresh()
    assert tasks.begun == 1
    clock.now_s += 1
    report.refresh()
    assert tasks.begun == 2


def test_a_refresh_never_waits_and_never_starts_a_second_one(report, tasks, clock):
    tasks.is_done = False
    for _ in range(5):
        report.refresh()
        clock.now_s += 10 * MIN_INTERVAL_S
    assert tasks.begun == 1 and not tasks.waited_s


@pytest.mark.parametrize(
    "error", [RayTaskError("_write", "traceback", OSError("no space left")), TimeoutError("not ready")]
)
def test_a_failure_is_a_warning_with_a_remedy_and_the_next_one_is_written(
    report, tasks, clock, caplog, error, tmp_path
):
    tasks.error = error
    report.refresh()
    clock.now_s += MIN_INTERVAL_S
    with caplog.at_level(logging.WARNING):
        report.refresh()
    assert tasks.begun == 2 and f"`digen report {tmp_path}` writes it" in caplog.text
    report.finish()
    assert tasks.begun == 3


def test_the_task_writes_into_the_runs_folder_and_says_how_long_it_took(tmp_path):
    make_run(tmp_path)
    assert refresh_report(tmp_path) > 0 and (tmp_path / REPORT).stat().st_size > 1_000_000


def test_the_task_imports_neither_torch_nor_ray():
    code = "import sys, verl_digen.report.page; print({'torch', 'ray', 'verl'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_rollout_data_has_the_parts_of_the_rewards(tmp_path):
    tags = [make_tag(1.0, parts={"mine": 1.0, "mine/red": 3.0}), make_tag(2.0, parts={"mine": 2.0})]

    def dump(dump_path, **columns):
        PPOTrainer._write_generations(**columns, dump_path=dump_path, global_steps=3)

    trainer = SimpleNamespace(_result=SimpleNamespace(tags=tags, samples=["a", "b"]), _dump_generations=dump)
    DiffusionTrainer._log_rollout_data(trainer, None, {}, str(tmp_path))  # type: ignore[arg-type]
    first, second = map(json.loads, (tmp_path / "3.jsonl").read_text().splitlines())
    assert (first["score"], first["reward/mine"], first["reward/mine/red"]) == (1.0, 1.0, 3.0)
    assert (second["key"], second["reward/mine"], second["reward/mine/red"]) == ("b", 2.0, None)
