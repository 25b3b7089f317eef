# SPDX-License-Identifier: Apache-2.0
"""Intervals, clocks, recorders and the file: from recording to reading back."""

import doctest
import json
import random
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from tests.observe.timeline_runs import START_S, interval, lane, random_intervals, simulated_run
from verl_digen.observe.timeline import interval as interval_module
from verl_digen.observe.timeline import recorder
from verl_digen.observe.timeline.analysis import step_metrics
from verl_digen.observe.timeline.file import TimelineFile, read_timeline
from verl_digen.observe.timeline.interval import from_line, join_parts, to_line
from verl_digen.observe.timeline.recorder import Recorder, unix_clock


class SettableClock:
    """A clock that the test sets."""

    def __init__(self, now_s=START_S):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


FULL = interval(
    "generate",
    0.125,
    1.5,
    version=2,
    chunk_id="p7/0",
    fragment_id="f1",
    group_ids=("p7", "p8"),
    num_samples=4,
    is_cut=True,
    detail={"gain_s": 0.25, "note": "re-issued"},
)


# -- schema -----------------------------------------------------------------------------------------------
def test_an_interval_survives_its_line_unchanged():
    rng = random.Random(1)
    for original in [FULL, *random_intervals(rng)[0], *simulated_run()[0]]:
        assert from_line(json.loads(json.dumps(to_line(original)))) == original


def test_a_line_is_json_that_every_reader_takes():
    text = json.dumps(to_line(interval("commit", 0, 1, detail={"wait_s": float("inf"), "n": 1})), allow_nan=False)
    assert from_line(json.loads(text)).detail == {"wait_s": "inf", "n": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: interval("bake", 0, 1), "kind of an interval must be one of train"),
        (lambda: interval("commit", 1, 0), "interval commit of generator/0 in step 1 must end at a moment not before"),
        (lambda: interval("commit", 0, float("nan")), "must end at a moment not before its start"),
        (lambda: interval("wait", 0, 1), "needs a reason, one of no_fragment_ready"),
        (lambda: interval("wait", 0, 1, reason="unattributed"), "got 'unattributed'"),
        (lambda: interval("train", 0, 1, reason="scoring"), "only a wait has a reason"),
        (lambda: interval("generate", 0, 1, chunk_id=None), "needs the chunk_id"),
        (lambda: interval("train", 0, 1, fragment_id=None), "needs the fragment_id"),
        (lambda: lane("gpu"), "pool of a lane must be one of generator"),
    ],
)
def test_a_broken_rule_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_parts_join_and_two_runs_of_a_chunk_do_not():
    parts = [
        interval("generate", 0, 1, is_cut=True),
        interval("generate", 1, 2, is_cut=True),
        interval("generate", 2, 3, detail={"seen": "last"}),
        interval("generate", 0, 2, chunk_id="other"),
        interval("generate", 8, 9),  # the first chunk again
        interval("assist", 4, 5, is_cut=True, chunk_id="lost"),  # the run ended
        interval("assist", 6, 7, chunk_id="lost"),
    ]
    joined = join_parts(random.Random(0).sample(parts, len(parts)))
    spans = [(one.kind, one.chunk_id, one.start_s - START_S, one.end_s - START_S, one.is_cut) for one in joined]
    assert spans == [
        ("generate", "c", 0, 3, False),
        ("generate", "other", 0, 2, False),
        ("assist", "lost", 4, 5, True),
        ("assist", "lost", 6, 7, False),
        ("generate", "c", 8, 9, False),
    ]
    assert joined[0].detail == {"seen": "last"}


@pytest.mark.parametrize("module", [interval_module, recorder])
def test_examples_in_the_docstrings_are_true(module):
    names = {"Recorder": Recorder, "Lane": interval_module.Lane}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted > 0 and result.failed == 0


def test_the_timeline_and_the_command_line_import_without_large_packages():
    """`digen --help` answers in a quarter of a second; numpy alone would add a third of that."""
    code = (
        "import sys, verl_digen.cli, verl_digen.observe.timeline as t; "
        "print([name for name in ('torch', 'ray', 'verl', 'numpy', 'PIL', 'matplotlib') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# -- clocks -----------------------------------------------------------------------------------------------
def test_the_unix_clock_starts_at_the_time_of_day_and_never_goes_back():
    before_s, now_s = time.time(), unix_clock()
    readings = [now_s() for _ in range(1000)]
    assert readings == sorted(readings)
    assert before_s - 1e-3 <= readings[0] <= time.time() + 1e-3


# -- recorder ---------------------------------------------------------------------------------------------
def test_every_moment_is_handed_over_once_however_often_it_is_drained():
    rng = random.Random(4)
    for _ in range(50):
        now_s = SettableClock()
        noting = Recorder(now_s=now_s)
        opened, expected, drained = {}, [], []
        for number in range(60):
            now_s.now_s += rng.choice([0.0, rng.uniform(0, 2)])
            action = rng.choice(["begin", "end", "drain"])
            if action == "begin":
                chunk = f"c{number}"
                opened[chunk] = (noting.begin("generate", lane("generator"), step=1, chunk_id=chunk), now_s.now_s)
            elif action == "end" and opened:
                chunk = rng.choice(sorted(opened))
                handle, start_s = opened.pop(chunk)
                noting.end(handle)
                expected.append((chunk, start_s, now_s.now_s))
            elif action == "drain":
                drained += noting.drain()
        for chunk, (handle, start_s) in opened.items():
            noting.end(handle)
            expected.append((chunk, start_s, now_s.now_s))
        drained += noting.drain()
        found = [(one.chunk_id, one.start_s, one.end_s) for one in join_parts(drained)]
        assert sorted(found) == sorted(expected)
        seconds = sum(end_s - start_s for _, start_s, end_s in expected)
        assert sum(one.duration_s for one in drained) == pytest.approx(seconds, abs=1e-9)
        assert noting.drain() == []


def test_a_body_is_timed_its_details_kept_and_its_exception_passed_on():
    now_s = SettableClock()
    noting = Recorder(now_s=now_s)
    with noting.interval("train", lane("trainer"), step=3, fragment_id="f0", num_samples=8) as detail:
        now_s.now_s += 2
        detail["num_tiles"] = 5
    with pytest.raises(KeyError), noting.interval("commit", lane("trainer"), step=3):
        now_s.now_s += 1
        raise KeyError("gone")
    train, commit = noting.drain()
    assert (train.duration_s, train.num_samples, train.detail) == (2, 8, {"num_tiles": 5})
    assert (commit.duration_s, commit.detail) == (1, {"failed": "KeyError"})


def test_a_full_recorder_counts_what_it_loses_and_says_so(caplog, monkeypatch):
    monkeypatch.setattr(recorder, "CAPACITY", 3)
    noting = Recorder()
    for number in range(5):
        with noting.interval("commit", lane("trainer"), step=number):
            pass
    assert [one.step for one in noting.drain()] == [0, 1, 2] and "lost 2 intervals" in caplog.text
    caplog.clear()
    assert noting.drain() == [] and not caplog.messages


def test_threads_share_a_recorder_without_loss():
    noting = Recorder()
    collected = []

    def work(index):
        for number in range(200):
            with noting.interval("score", lane("reward", index), step=1, group_ids=(f"{index}/{number}",)):
                pass

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        collected += noting.drain()
    collected += noting.drain()
    assert len({one.group_ids for one in collected if not one.is_cut}) == 800


def test_what_is_broken_is_refused_where_it_begins():
    noting = Recorder()
    with pytest.raises(ValueError, match="needs a reason"):
        noting.begin("wait", lane("trainer"), step=1)
    handle = noting.begin("wait", lane("trainer"), step=1, reason="scoring")
    noting.end(handle)
    with pytest.raises(RuntimeError, match="wait of trainer/0 in step 1 has ended already"):
        noting.end(handle)
    assert len(noting.drain()) == 1


# -- file -------------------------------------------------------------------------------------------------
def write(path, intervals, num_devices):
    TimelineFile(path, num_devices).append(intervals)


def test_what_is_appended_is_read_back_unchanged(tmp_path):
    path = tmp_path / "timeline.jsonl"
    intervals, num_devices = simulated_run()
    file = TimelineFile(path, num_devices)
    for step in (1, 2, 3):
        file.append([one for one in intervals if one.step == step])
    timeline = read_timeline(path)
    assert sorted(map(repr, timeline.intervals)) == sorted(map(repr, intervals))
    assert timeline.steps == [1, 2, 3] and timeline.num_devices[2] == num_devices
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"timeline": 1, "num_devices": num_devices} and len(lines) == len(intervals) + 1


def test_a_torn_last_line_costs_that_line_alone(tmp_path, caplog):
    path = tmp_path / "timeline.jsonl"
    intervals, num_devices = simulated_run(num_steps=1)
    write(path, intervals, num_devices)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for size in range(last + 1, len(whole)):
        path.write_bytes(whole[:size])
        timeline = read_timeline(path)
        assert len(timeline.intervals) == len(intervals) - 1
    assert "the last line is torn" in caplog.text
    resumed = TimelineFile(path, num_devices)
    resumed.keep_until(1)
    resumed.append(intervals[-1:])  # a header, then the line
    timeline = read_timeline(path)
    assert len(timeline.intervals) == len(intervals)


def test_a_resumed_run_keeps_what_happened_until_the_end_of_its_step(tmp_path):
    path = tmp_path / "timeline.jsonl"
    intervals, num_devices = simulated_run(num_steps=4)
    write(path, intervals, num_devices)
    before = {step: step_metrics(read_timeline(path).intervals, step, num_devices) for step in (1, 2)}
    resumed = TimelineFile(path, {"trainer": 2, "generator": 4})
    resumed.keep_until(2)
    (end_s,) = (one.end_s for one in intervals if one.kind == "step" and one.step == 2)
    kept = read_timeline(path).intervals
    expected = [one for one in intervals if one.step <= 2 or one.start_s < end_s]
    assert sorted(map(repr, kept)) == sorted(map(repr, expected))
    assert any(one.step == 3 and one.kind == "generate" for one in kept), "the run generated ahead"
    resumed.append([replace(one, lane=replace(one.lane, num_devices=0)) for one in intervals if one.step == 3])
    timeline = read_timeline(path)
    assert timeline.num_devices == {1: num_devices, 2: num_devices, 3: {"trainer": 2, "generator": 4}}
    for step in (1, 2):
        assert (
            step_metrics(timeline.intervals, step, num_devices)["perf/images_per_s"]
            == before[step]["perf/images_per_s"]
        )
    assert not list(tmp_path.glob("*.tmp"))


def test_a_fresh_run_drops_all_and_no_file_is_no_error(tmp_path):
    path = tmp_path / "timeline.jsonl"
    TimelineFile(path, {"trainer": 1}).keep_until(0)
    assert not path.exists()
    write(path, *simulated_run())
    fresh = TimelineFile(path, {"trainer": 1})
    fresh.keep_until(0)
    fresh.append([interval("step", 0, 1)])
    assert len(path.read_text().splitlines()) == 2


def test_a_broken_file_is_refused_with_the_line(tmp_path):
    path = tmp_path / "timeline.jsonl"
    write(path, [interval("step", 0, 1), interval("commit", 0, 1)], {"trainer": 1})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(ValueError, match=r"line 2 must be a line of a timeline, .*\(JSONDecodeError.*delete that line"):
        read_timeline(path)
    path.write_text(lines[0] + lines[1].replace('"kind":"step"', '"kind":"stop"') + lines[2])
    with pytest.raises(ValueError, match=r"line 2 .*kind of an interval must be one of"):
        read_timeline(path)
    path.write_text("".join(lines[1:]))
    with pytest.raises(ValueError, match="first line must be a header"):
        read_timeline(path)
    path.write_text(lines[0].replace('"timeline":1', '"timeline":2'))
    with pytest.raises(ValueError, match="schema must be version 1, got 2; use the verl-digen that wrote"):
        read_timeline(path)
