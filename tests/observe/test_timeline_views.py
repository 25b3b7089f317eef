# SPDX-License-Identifier: Apache-2.0
"""The trace and the command."""

import json
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.observe.timeline_runs import START_S, interval, lane, random_intervals, simulated_run
from verl_digen import cli
from verl_digen.observe.timeline.file import TimelineFile, read_timeline
from verl_digen.observe.timeline.interval import KINDS, UNATTRIBUTED, WAIT_REASONS
from verl_digen.observe.timeline.trace import group_label, group_names, rows, to_trace
from verl_digen.report import timelines

EVER = (float("-inf"), float("inf"))


# -- layout -----------------------------------------------------------------------------------------------
def test_rows_never_overlap_and_are_as_few_as_possible():
    rng = random.Random(0)
    for _ in range(200):
        chunks = [
            interval("generate", at, at + rng.choice([0, 1, rng.random() * 4])) for at in rng.choices(range(9), k=12)
        ]
        assigned = rows(chunks)
        for row in set(assigned):
            own = sorted((c.start_s, c.end_s) for c, r in zip(chunks, assigned, strict=True) if r == row)
            assert all(left[1] <= right[0] for left, right in pairwise(own))
        lasting = [c for c in chunks if c.duration_s]
        at_once = max((sum(o.start_s <= c.start_s < o.end_s for o in lasting) for c in lasting), default=1)
        assert max(rows(lasting), default=0) + 1 == at_once


def test_groups_are_named_in_the_order_in_which_they_were_begun():
    chunks = [
        interval("generate", 3, 4, group_ids=("x",)),
        interval("generate", 0, 1, group_ids=("y",)),
        interval("assist", 1, 2, group_ids=("a",)),
        interval("generate", 5, 6, group_ids=("b",), step=2),
    ]
    names = group_names(chunks)
    assert names == {(1, "y"): "g1", (1, "a"): "g2", (1, "x"): "g3", (2, "b"): "g1"}
    train = interval("train", 6, 7, group_ids=("x", "y", "a"))
    assert group_label(train, names) == "g1..g3"
    assert group_label(replace(train, group_ids=("x", "y")), names) == "g1+g3"
    assert group_label(replace(train, group_ids=("unknown",)), names) == ""


# -- trace ------------------------------------------------------------------------------------------------
def assert_valid_trace(trace):
    """The rules of the Trace Event Format that the viewers rely on."""
    text = json.dumps(trace, allow_nan=False)
    events = json.loads(text)["traceEvents"]
    named = {(e["pid"], e["tid"]) for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    processes = {e["pid"] for e in events if e["ph"] == "M" and e["name"] == "process_name"}
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    threads = defaultdict(list)
    for event in timed:
        assert {"ph", "name", "cat", "pid", "tid", "ts"} <= set(event)
        assert event["ts"] >= 0 and event["ph"] in ("X", "s", "f")
        assert (event["pid"], event["tid"]) in named and event["pid"] in processes
        if event["ph"] == "X":
            assert event["dur"] >= 0 and isinstance(event["args"], dict)
            threads[event["pid"], event["tid"]].append(event)
    for of_thread in threads.values():
        for left, right in pairwise(of_thread):
            assert left["ts"] + left["dur"] <= right["ts"] + 1e-4  # us: a tenth of a nanosecond, of rounding
    assert 0 not in {number for thread in named for number in thread}  # the idle process, to Perfetto
    assert len({tid for _, tid in named}) == len(named)
    starts, ends = ([e for e in timed if e["ph"] == phase] for phase in ("s", "f"))
    assert sorted(e["id"] for e in starts) == sorted(e["id"] for e in ends) == list(range(len(starts)))
    return threads, starts, ends


def around(event, of_thread):
    return [e for e in of_thread if e["ts"] <= event["ts"] <= e["ts"] + e["dur"]]


@pytest.mark.parametrize("early", [True, False])
def test_the_trace_is_valid_and_an_arrow_leads_from_each_chunk_to_the_training_of_its_group(early):
    intervals, _ = simulated_run(early=early)
    threads, starts, ends = assert_valid_trace(to_trace(intervals, EVER))
    chunks = [one for one in intervals if one.kind in ("generate", "assist")]
    assert len(starts) == len(chunks)
    assert sum(map(len, threads.values())) == len(intervals)
    for start, end in zip(sorted(starts, key=lambda e: e["id"]), sorted(ends, key=lambda e: e["id"]), strict=True):
        (source,) = around(start, threads[start["pid"], start["tid"]])
        targets = around(end, threads[end["pid"], end["tid"]])
        assert source["cat"] in ("generate", "assist") and end["bp"] == "e"
        target = next(e for e in targets if e["ts"] == end["ts"])
        assert target["cat"] == "train"
        assert set(source["args"]["group_ids"]) <= set(target["args"]["group_ids"])
        assert start["ts"] <= end["ts"]


def test_a_trace_of_anything_is_valid_and_holds_the_facts():
    rng = random.Random(0)
    for _ in range(50):
        assert_valid_trace(to_trace(random_intervals(rng)[0], EVER))
    assert_valid_trace(to_trace([], EVER))
    waiting = interval("wait", 1, 3, step=4, on=lane("trainer"), reason="scoring", detail={"gain_s": -0.5})
    trace = to_trace([interval("step", 0, 9, step=4), waiting], (START_S, START_S + 9))
    (event,) = (e for e in trace["traceEvents"] if e["ph"] == "X" and e["cat"] == "wait")
    assert event["name"] == "wait: scoring" and (event["ts"], event["dur"]) == (1e6, 2e6)
    assert (
        event["args"]["detail"] == {"gain_s": -0.5} and event["args"]["step"] == 4 and event["args"]["host"] == "node-0"
    )
    assert trace["otherData"]["start_unix_s"] == START_S


def test_every_kind_has_a_colour_and_words():
    assert set(timelines.KINDS) == set(KINDS) - {"step"}
    assert len({shown["colour"] for shown in timelines.KINDS.values()}) == len(timelines.KINDS)
    assert set(timelines.CAUSES) == {*WAIT_REASONS, UNATTRIBUTED}


# -- command ----------------------------------------------------------------------------------------------
@pytest.fixture
def run_dir(tmp_path):
    intervals, num_devices = simulated_run()
    TimelineFile(tmp_path / "timeline.jsonl", num_devices).append(intervals)
    return tmp_path


def digen_timeline(*argv):
    return cli.main(["timeline", *map(str, argv)])


def test_the_last_complete_step_is_shown_by_default(run_dir, capsys):
    assert digen_timeline(run_dir) == 0
    text = capsys.readouterr().out
    assert text.startswith("step 3: ") and "images/s" in text and "first group complete after" in text
    lines = {line.split()[0]: line for line in text.splitlines()[2:4]}
    assert "100.0%" in lines["trainer"] or "no_fragment_ready" in lines["trainer"]
    assert "batch_done" in lines["generator"] and " 4 " in lines["generator"]
    out = run_dir / "timeline"
    assert sorted(path.name for path in out.iterdir()) == ["timeline_step_3.trace.json"]
    assert_valid_trace(json.loads((out / "timeline_step_3.trace.json").read_text()))


def test_one_step_or_all_go_where_they_are_asked_to(run_dir, tmp_path, capsys):
    assert digen_timeline(run_dir, "--step", 2, "--out", tmp_path / "one") == 0
    assert len(list((tmp_path / "one").iterdir())) == 1
    assert digen_timeline(run_dir, "--step", "all", "--out", tmp_path / "all") == 0
    assert len(list((tmp_path / "all").iterdir())) == 3
    assert not (run_dir / "timeline").exists()


def test_an_incomplete_step_is_not_the_last(run_dir):
    with open(run_dir / "timeline.jsonl", "a") as file:
        file.write('{"kind":"commit","step":4,"lane":"trainer/0","host":"a","num_devices":4,"start_s":1,"end_s":2}\n')
    assert read_timeline(run_dir / "timeline.jsonl").steps == [1, 2, 3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("nowhere",), "RUN_DIR must be the folder of a run, its "),
        (("empty",), "with a timeline.jsonl, which a run writes from its first step on"),
        (("begun",), "holds no complete step yet"),
        ((".", "--step", "9"), "--step must be all, last or a complete step (1 to 3), got 9"),
        ((".", "--step", "two"), "--step must be all, last or a complete step (1 to 3), got two"),
        (("broken",), "line 1 must be a line of a timeline"),
    ],
)
def test_a_mistake_is_told_in_one_line(run_dir, capsys, argv, message):
    for name in ("empty", "begun", "broken"):
        (run_dir / name).mkdir()
    TimelineFile(run_dir / "begun" / "timeline.jsonl", {"trainer": 1}).append([interval("commit", 0, 1)])
    (run_dir / "broken" / "timeline.jsonl").write_text("no json\n")
    assert digen_timeline(run_dir / argv[0], *argv[1:]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.out == "" and len(output.err.splitlines()) == 1
