# SPDX-License-Identifier: Apache-2.0
"""Intervals that the trainer on separate pools writes around verl's calls: checkpoints and validations."""

import itertools
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tags import make_tag
from verl_digen.observe.timeline.file import TimelineFile, read_timeline
from verl_digen.observe.timeline.interval import Lane
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.trainer.timelines import IdleLanes
from verl_digen.types import RewardCall

TRAINER = Lane("trainer", 0, "here", 2)


class Work(DiffusionTrainer):
    """Stands below `DisaggregatedTrainer`: saving and validating end at once."""

    fails = False

    def _save_checkpoint(self):
        if self.fails:
            raise OSError("no space left")

    def _validate(self):
        return {"val/reward": 0.5}


class InTurn(ColocatedTrainer, Work):
    """A colocated trainer with timeshared rewards, after a validation of the policy `validated`."""

    _validated_policy, _behaviour = "", "current"

    def __init__(self, validated):
        self._timeline = SimpleNamespace(working=lambda kind: nullcontext())
        self._validated_policy, self.calls = validated, []
        self._turns = SimpleNamespace(
            generate=lambda: self.calls.append("generate"), end=lambda: self.calls.append("end")
        )


@pytest.mark.parametrize(("validated", "call"), [("current", "generate"), ("average", "end")])
def test_rewards_leave_the_devices_after_a_validation_and_replicas_with_other_weights_are_not_woken(validated, call):
    trainer = InTurn(validated)
    assert trainer._validate() == {"val/reward": 0.5} and trainer.calls == [call]


@pytest.mark.parametrize(("began_s", "lines"), [(0.0, [4]), (17.5, [])])
def test_a_validation_has_a_line_of_its_own_only_before_the_first_step(began_s, lines):
    written = []
    trainer: Any = SimpleNamespace(
        **dict.fromkeys(("val_dataloader", "_wandb", "_first_step")),
        **{"global_steps": 4, "_step_began_s": began_s, "_watch_rewards": lambda metrics: {}},
        agent_loop_manager=SimpleNamespace(generate_sequences=None),
        _validation=SimpleNamespace(run=lambda *given, **named: {"val/reward": 0.5}),
        _output=SimpleNamespace(on_validation=lambda step, metrics: written.append(step)),
    )
    assert DiffusionTrainer._validate(trainer) == {"val/reward": 0.5} and written == lines


class Trainer(DisaggregatedTrainer, Work):
    """A trainer in step 3, on a clock that counts its readings."""

    def __init__(self, path):
        self._recorder = Recorder(now_s=map(float, itertools.count()).__next__)
        self._driver = Lane("driver", 0, "here", 0)
        self._conductor = SimpleNamespace(trainer_lane=TRAINER)
        self._num_devices = {"trainer": 2}
        self._timeline_file = TimelineFile(path, self._num_devices)
        self._previous_intervals = []
        self._result, self._reward_names = SimpleNamespace(samples={}), ["ocr"]
        self.global_steps = 3
        self._step_began_s = self._recorder.now_s()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "timeline.jsonl"


def seen(path):
    return [(interval.kind, interval.lane.name, interval.step) for interval in read_timeline(path).intervals]


def test_a_checkpoint_is_work_of_the_trainers_lane_in_its_step(path):
    trainer = Trainer(path)
    trainer._save_checkpoint()
    trainer._close_timeline()
    assert seen(path) == [("step", "driver/0", 3), ("save", "trainer/0", 3)]
    assert trainer._timeline_metrics["perf/busy_s/trainer/save"] == 2 * 1.0, "two devices, one tick"


def test_calls_of_rewards_are_written_with_the_step_whose_samples_they_scored(path):
    trainer = Trainer(path)
    call = RewardCall("ocr", 0.0, 0.5, num_samples=8, num_queued=0)
    trainer._result = SimpleNamespace(samples={f"p0_{index}_2": make_tag(calls=(call,)) for index in range(8)})
    trainer._close_timeline()
    assert sorted(seen(path)) == [("score", "reward/1", 3), ("step", "driver/0", 3)]


def test_a_checkpoint_that_fails_leaves_its_interval(path):
    trainer = Trainer(path)
    trainer.fails = True
    with pytest.raises(OSError, match="no space left"):
        trainer._save_checkpoint()
    (interval,) = trainer._recorder.drain()
    assert (interval.kind, interval.detail) == ("save", {"failed": "OSError"})


def test_a_validation_is_on_disk_at_its_end_because_no_step_may_follow(path):
    trainer = Trainer(path)
    trainer._close_timeline()
    assert trainer._validate() == {"val/reward": 0.5}
    assert seen(path) == [("step", "driver/0", 3), ("validate", "driver/0", 3)]


def test_what_ends_during_a_validation_counts_in_the_next_step(path):
    """The drain before a validation finishes chunks of the next batch."""
    trainer = Trainer(path)
    generator = Lane("generator", 0, "here", 1)
    trainer._num_devices["generator"] = 1
    trainer._close_timeline()
    for uid in ("p0", "p1"):
        with trainer._recorder.interval("generate", generator, step=4, chunk_id=uid, group_ids=(uid,)):
            pass
    trainer._validate()
    trainer.global_steps, trainer._step_began_s = 4, trainer._recorder.now_s()
    trainer._close_timeline()
    assert 0 < trainer._timeline_metrics["perf/first_group_fraction"] < 1


def test_a_lane_that_still_waits_for_the_same_has_one_interval():
    noting, lane = Recorder(), Lane("trainer", 0, "node", 1)
    idle = IdleLanes(noting)
    for reason, step in (("scoring", 1), ("scoring", 1), ("prompts", 1), ("prompts", 2)):
        idle.wait(lane, reason, step)
    idle.stop(lane)
    assert [(one.reason, one.step) for one in noting.drain()] == [("scoring", 1), ("prompts", 1), ("prompts", 2)]
