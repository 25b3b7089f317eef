# SPDX-License-Identifier: Apache-2.0
"""Turns on devices that replicas and rewards share, and what the driver calls when they change."""

from __future__ import annotations

import os
import random
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.tags import make_tag
from verl_digen.config.placement import timeshared_options
from verl_digen.errors import RunStopped
from verl_digen.observe.timeline.analysis import step_metrics
from verl_digen.observe.timeline.file import read_timeline
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.reward.scoring import DeviceMove
from verl_digen.store.samples import PromptStatus, to_listing
from verl_digen.trainer import timelines
from verl_digen.trainer.timelines import ColocatedTimeline
from verl_digen.trainer.turns import RewardProcesses, RewardTurn, Turns, next_turn, num_events, turn_metrics
from verl_digen.types import RewardCall, SampleTag

PENDING, RUNNING = PromptStatus("pending"), PromptStatus("running")
GENERATED, FINISHED = PromptStatus("running", is_generated=True), PromptStatus("finished")
FAILED = PromptStatus("failure", "no score", is_generated=True)


@pytest.mark.parametrize(
    ("turn", "prompts", "expected"),
    [
        ("generating", [RUNNING, GENERATED], "generating"),
        ("generating", [PENDING, GENERATED, FINISHED], "generating"),
        ("generating", [GENERATED, GENERATED], "scoring"),
        ("generating", [GENERATED, FAILED, FINISHED], "scoring"),
        ("generating", [FINISHED, FAILED], "generating"),
        ("generating", [], "generating"),
        ("scoring", [GENERATED, FINISHED], "scoring"),
        ("scoring", [GENERATED, PENDING], "scoring"),
        ("scoring", [FINISHED, FAILED], "scoring"),
        ("scoring", [FINISHED, PENDING], "generating"),
        ("scoring", [RUNNING, RUNNING], "generating"),
    ],
)
def test_the_turn_changes_when_no_open_group_can_go_on_in_it(turn, prompts, expected):
    assert next_turn(turn, prompts) == expected


def test_a_status_tells_through_its_entry_that_its_group_is_generated():
    entries = {"g": {"is_prompt": True, "status": "running", "is_generated": True}, "h": {"status": "running"}}
    assert to_listing(entries).prompts == {"g": GENERATED, "h": RUNNING}


class Devices:
    """The shared devices: who is awake; fails when both are."""

    def __init__(self) -> None:
        self.replicas, self.rewards = True, False
        self.calls: list[str] = []

    def _set(self, call: str, **awake: bool) -> None:
        self.calls.append(call)
        vars(self).update(awake)
        assert not (self.replicas and self.rewards), f"both are awake after {self.calls}"

    def sleep_replicas(self) -> None:
        self._set("replicas sleep", replicas=False)

    def wake_replicas(self) -> None:
        self._set("replicas wake", replicas=True)

    def wake(self) -> None:
        self._set("rewards wake", rewards=True)

    def sleep(self) -> None:
        self._set("rewards sleep", rewards=False)

    def keep_awake(self) -> None:
        assert self.rewards


def turns_on(devices: Devices) -> Turns:
    return Turns(devices, sleep_replicas=devices.sleep_replicas, wake_replicas=devices.wake_replicas)


def test_replicas_generate_then_rewards_score_then_both_sleep():
    devices = Devices()
    turns = turns_on(devices)
    for prompts in ([PENDING], [RUNNING], [GENERATED], [GENERATED], [FINISHED]):
        turns.observe(prompts)
    assert devices.calls == ["replicas sleep", "rewards wake"]
    turns.end()
    turns.end()
    assert devices.calls == ["replicas sleep", "rewards wake", "rewards sleep"]


@pytest.mark.parametrize("seed", range(20))
def test_every_group_of_a_batch_ends_although_groups_fail_and_are_replaced(seed):
    rng, devices = random.Random(seed), Devices()
    turns = turns_on(devices)
    groups: dict[int, PromptStatus] = dict.fromkeys(range(6), PENDING)
    number, polls, last = 6, 0, -1
    while any(not status.has_ended for status in groups.values()):
        polls += 1
        assert polls < 1000, f"nothing goes on: {groups}, {devices.calls}"
        for uid, status in list(groups.items()):
            if rng.random() < 0.5 or status.has_ended:
                continue
            if devices.replicas and not status.is_generated:
                groups[uid] = rng.choice((RUNNING, GENERATED, GENERATED, PromptStatus("failure", "no device")))
            elif devices.rewards and status.is_generated:
                groups[uid] = rng.choice((FINISHED, FINISHED, FAILED))
            if groups[uid].status == "failure":  # the replay buffer clears it, and draws a new prompt
                del groups[uid]
                groups[number], number, last = PENDING, number + 1, -1
        events = num_events(groups.values())
        assert events >= last
        last = events
        turns.observe(groups.values())
    assert num_events(groups.values()) == 12


def test_metrics_are_the_mean_of_the_processes_and_memory_the_largest():
    turns = [
        RewardTurn("r", 0, "wake", DeviceMove(0.0, 1.0, 900)),
        RewardTurn("r", 1, "wake", DeviceMove(0.0, 2.0, 900)),
        RewardTurn("r", 0, "sleep", DeviceMove(5.0, 5.5, 3_000_000)),
        RewardTurn("r", 1, "sleep", DeviceMove(5.0, 5.1, 1_000_000)),
        RewardTurn("r", 0, "wake", DeviceMove(7.0, 8.0, 900)),
    ]
    assert turn_metrics(turns) == pytest.approx(
        {"reward_calls/r_wake_s": 2.0, "reward_calls/r_sleep_s": 0.3, "reward_calls/r_asleep_gb": 0.003}
    )


CALL = RewardCall("r", 4.0, 5.0, num_samples=4, num_queued=0)


def tag_of(uid: str, calls: tuple[RewardCall, ...] = (CALL,), at: float = 0.0) -> SampleTag:
    """A sample that is generated in the second after `at`."""
    return make_tag(uid=uid, calls=calls, generated=(at + 1.0, at + 2.0), scored=(at + 2.0, at + 2.5))


class Clock:
    """A clock that tells these moments, one after the other."""

    def __init__(self, moments: list[float]):
        self._moments = iter(moments)

    def time(self) -> float:
        return next(self._moments)


def test_the_timeline_has_the_turns_of_a_step_in_order_and_can_be_analysed(tmp_path, monkeypatch):
    timeline = ColocatedTimeline(tmp_path, ["other", "r"], num_devices=2, after=0, host="node-1")
    samples = {f"{uid}_{index}_0": tag_of(uid) for uid in ("g", "h") for index in range(2)}
    turns = [RewardTurn("r", 0, "wake", DeviceMove(3.0, 4.0, 9)), RewardTurn("r", 0, "sleep", DeviceMove(5.0, 6.0, 1))]
    monkeypatch.setattr(timelines, "time", Clock([6.0, 9.0, 9.0, 9.5]))
    with timeline.working("train"):
        pass
    with timeline.working("publish"):
        pass
    timeline.write(1, samples, turns, extent=(0.0, 10.0))
    found = read_timeline(tmp_path / "timeline.jsonl")
    shown = [(one.kind, one.lane.name, one.start_s, one.end_s) for one in found.intervals if one.kind != "step"]
    assert shown == [
        ("generate", "generator/0", 1.0, 2.0),
        ("generate", "generator/0", 1.0, 2.0),
        ("generate", "trainer/0", 1.0, 2.0),
        ("wake", "reward/2", 3.0, 4.0),
        ("score", "reward/2", 4.0, 5.0),
        ("sleep", "reward/2", 5.0, 6.0),
        ("train", "trainer/0", 6.0, 9.0),
        ("publish", "trainer/0", 9.0, 9.5),
    ]
    metrics = step_metrics(found.intervals, 1, found.num_devices[1])
    assert metrics["perf/busy_s/trainer/train"] == 6.0 and metrics["perf/images_per_s"] == 0.4
    assert metrics["perf/busy_s/trainer/generate"] == 2.0 and metrics["perf/bubble_fraction/trainer"] == 0.55
    assert {one.lane.host for one in found.intervals} == {"node-1"}


def test_rewards_without_processes_have_a_lane_and_a_resumed_run_continues(tmp_path):
    for after in (0, 1):
        timeline = ColocatedTimeline(tmp_path, ["r"], num_devices=1, after=after, host="node-1")
        for step in (1, 2) if after == 0 else (2,):
            samples = {f"g_{index}_0": tag_of("g", calls=(), at=10.0 * step) for index in range(2)}
            timeline.write(step, samples, [], extent=(10.0 * step, 10.0 * step + 9))
    found = read_timeline(tmp_path / "timeline.jsonl")
    assert found.steps == [1, 2] and len([one for one in found.intervals if one.kind == "step"]) == 2
    scored = [(one.lane.name, one.start_s, one.end_s) for one in found.intervals if one.kind == "score"]
    assert scored == [("reward/0", 12.0, 12.5), ("reward/0", 22.0, 22.5)]


def test_a_clock_that_is_set_back_costs_spans_of_the_timeline_and_not_the_run(tmp_path):
    timeline = ColocatedTimeline(tmp_path, [], num_devices=1, after=0, host="node-1")
    samples = {"g": make_tag(uid="g", generated=(8.0, 2.0), scored=(2.0, 1.0))}
    timeline.write(1, samples, [], extent=(0.0, 9.0))
    found = read_timeline(tmp_path / "timeline.jsonl").intervals
    spans = {one.lane.pool: (one.start_s, one.end_s) for one in found}
    assert spans["generator"] == (8.0, 8.0) and spans["reward"] == (2.0, 2.0)


def test_devices_generate_once_where_groups_overlap_and_again_for_those_that_replace_failed_ones(tmp_path):
    timeline = ColocatedTimeline(tmp_path, [], num_devices=1, after=0, host="node-1")
    spans = {"late": (7.0, 8.0), "long": (1.0, 5.0), "short": (2.0, 3.0), "touching": (5.0, 6.0)}
    timeline.write(1, {uid: make_tag(uid=uid, generated=span) for uid, span in spans.items()}, [], extent=(0.0, 9.0))
    found = [one for one in read_timeline(tmp_path / "timeline.jsonl").intervals if one.lane.pool == "trainer"]
    assert [(one.chunk_id, one.start_s, one.end_s, one.num_samples) for one in found] == [
        ("step-1", 1.0, 6.0, 3),
        ("step-1-1", 7.0, 8.0, 1),
    ]


def test_a_reward_has_a_process_in_the_bundle_of_every_device_and_takes_no_cpu():
    groups = [SimpleNamespace(bundle_count=2), SimpleNamespace(bundle_count=1)]
    pool = SimpleNamespace(get_placement_groups=lambda device_name: groups)
    options = timeshared_options(pool)
    places = [one["scheduling_strategy"] for one in options]
    assert [(one.placement_group, one.placement_group_bundle_index) for one in places] == [
        (groups[0], 0),
        (groups[0], 1),
        (groups[1], 0),
    ]
    assert all(one["num_cpus"] == 0 and 0 < one["num_gpus"] < 0.1 for one in options)


class Process:
    """A reward's process that notes its wakes in a file, and dies at the first of them if it is told to."""

    def __init__(self, folder: Any, error: str = ""):
        self._folder, self._error = folder, error
        self._is_awake = False

    async def wake(self) -> DeviceMove | None:
        if self._error:
            raise ValueError(self._error)
        if self._is_awake:
            return None
        self._is_awake = True
        (self._folder / str(time.time_ns())).touch()
        return DeviceMove(time.time(), time.time(), 5)

    async def sleep(self) -> DeviceMove | None:
        self._is_awake = False
        return DeviceMove(time.time(), time.time(), 0)

    async def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_dies_awake_is_woken_again_and_one_that_cannot_wake_ends_the_run(
    ray_cluster, tmp_path, monkeypatch
):
    from verl_digen.processes.workers import RestartingActor

    monkeypatch.setattr("verl_digen.trainer.turns.KEEP_AWAKE_S", 0.0)
    worker = RestartingActor(Process, 1, num_cpus=0).remote(tmp_path)
    rewards = RewardProcesses({"r": [worker]}, DeadlinesConfig())
    rewards.wake()
    worker.die.remote()
    until_s = time.monotonic() + 60
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until_s:
        rewards.keep_awake()
        time.sleep(0.05)
    assert len(list(tmp_path.iterdir())) == 2, "it was not woken again after its restart"
    rewards.sleep()
    assert [turn.change for turn in rewards.take_turns()][-1] == "sleep" and rewards.take_turns() == []

    broken = RestartingActor(Process, 1, num_cpus=0)
    rewards = RewardProcesses({"r": [broken.remote(tmp_path, "no such weights")]}, DeadlinesConfig())
    with pytest.raises(RunStopped, match=r"functions\.r could not wake .*no such weights.*num_gpus in place"):
        rewards.wake()
