# SPDX-License-Identifier: Apache-2.0
"""The report's page without a browser: what is in it, how large it gets, and what it says of what is missing."""

import json
import os
import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path

import pytest
from PIL import Image

from tests.report.runs import HOSTILE, PROMPTS, add_groups, add_validation, make_run, metrics_of, save_noise
from verl_digen import cli
from verl_digen.observe.run_files import END, METRICS, REPORT, START, WARNINGS, image_path
from verl_digen.observe.timeline.file import NAME
from verl_digen.report import page, pictures, timelines
from verl_digen.report.curves import MAX_COLUMNS, MAX_ROWS, columns, distributions, read_rows
from verl_digen.report.page import MAX_BYTES, collect, render, write_report
from verl_digen.report.summary import planned_steps, tiles, warnings_of
from verl_digen.trainer.run_output import append_metrics

DATA = re.compile(r'<script id="data" type="application/json">(.*?)</script>', re.DOTALL)


def data_of(text: str):
    """The data in a page, as a browser finds it: up to the first end of a script."""
    [found] = DATA.findall(text)
    return json.loads(found)


def test_the_page_holds_the_data_unchanged_and_no_text_of_a_run_is_markup(tmp_path):
    data = collect(make_run(tmp_path / HOSTILE.replace("/", "_")))
    text = render(data)
    assert data_of(text) == data
    assert data["validations"]["prompts"] == list(PROMPTS)
    assert HOSTILE.replace("/", "_") not in text, "the title is escaped too"
    assert text.count("</script") == 3 and text.count("<script") == 3 + text.split("<body>")[1].count('"<script')


def test_the_page_fetches_nothing(tmp_path):
    text = render(collect(make_run(tmp_path)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "default-src 'none'" in policy[1] and "http" not in policy[1]
    own = text.replace(page.plotly(), "")
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|@import|url\(', own)


def test_everything_a_run_leaves_is_in_it(tmp_path):
    data = collect(make_run(tmp_path / "try"))
    assert data["missing"] == {"empty": {}, "left_out": []}
    assert data["heading"]["name"] == "try" and ["objective", "flow_grpo"] in data["heading"]["facts"]
    told = {tile["label"]: (tile["value"], tile["detail"]) for tile in data["tiles"]}
    assert told["Validation reward"] == ("0.64", "+0.04 since step 0 (0.6) · best 0.64 after step 4")
    assert told["Steps"] == ("4", "of 4") and told["Idle"][0] == "25%"
    found = data["curves"]["columns"]
    assert found["step"] == [0, 1, 2, 3, 4] and found["val/reward"] == [0.6, None, 0.62, None, 0.64]
    shown = data["validations"]
    assert shown["steps"] == shown["reward_steps"] == [0, 2, 4] and shown["rewards"][1] == [0.02, 1.02, 2.02]
    assert all(picture.startswith("data:image/webp;base64,") for step in shown["pictures"] for picture in step)
    [[best, worst]] = data["groups"]["groups"][-1]
    assert (best["reward"], worst["reward"]) == (1.0, 0.0) and best["prompt"].startswith("best of 3: ")
    assert data["start"]["changes"] == [["trainer.total_training_steps", "60", "4"]]
    assert ["digen.empty", "{}"] in data["start"]["config"]
    [warning] = data["warnings"]["shown"]
    assert (warning["count"], warning["first_step"]) == (2, 2)


@pytest.mark.parametrize(
    ("total", "state", "ends"),
    [
        (9, "running", "about 5m00s left"),
        (4, "running", "ended 1970-01-01 00:06 UTC"),
        (9, "failed", "failed 1970-01-01 00:06 UTC"),
    ],
)
def test_time_leaves_out_what_lies_between_two_starts(total, state, ends):
    each = {"reward/mean": 0.5, "reward/std": 0.1, "perf/step_s": 30.0, "perf/images_per_s": 8.0}
    each |= {"perf/images_per_s_per_device": 4.0, "actor/perf/max_memory_allocated_gb": 21.25}
    rows = [{**each, "step": step, "at_s": 60.0 * (step + 2)} for step in range(1, 5)]
    start = {"at_s": 0.0, "config": [["trainer.total_training_steps", str(total)]], "changes": None}
    found = tiles(rows, start, {"shown": [], "num_left_out": 0}, state)
    told = {tile["label"]: (tile["value"], tile["detail"]) for tile in found}
    assert told["Time"] == ("6m00s", f"since 1970-01-01 00:00 UTC · {ends}")
    assert told["Device-hours"] == ("0.2", "on 2 devices")
    assert told["Memory of a trainer rank"][0] == "21.2 GB"
    later = [{**row, "at_s": row["at_s"] + 1e6 * (row["step"] > 2)} for row in rows]
    spent = {tile["label"]: tile["value"] for tile in tiles(later, start, {"shown": [], "num_left_out": 0}, state)}
    assert spent["Time"] == "35m30s", "at most half an hour more than the step's own time"
    back = [{**row, "at_s": row["at_s"] - 3000 * (row["step"] > 2)} for row in rows]
    spent = {tile["label"]: tile["value"] for tile in tiles(back, start, {"shown": [], "num_left_out": 0}, state)}
    assert spent["Time"] == "5m30s", "the step's own time, where the clock was set back"
    resumed = tiles(rows, {**start, "at_s": 200.0}, {"shown": [], "num_left_out": 0}, state)
    assert {tile["label"]: tile["value"] for tile in resumed}["Time"] == "3m30s", "from the first step's begin on"


@pytest.mark.parametrize(("value", "steps"), [("60", 60), ("null", None), ("${trainer.total_epochs}", None)])
def test_planned_steps_are_those_that_the_config_names_as_a_number(value, steps):
    assert planned_steps({"config": [["trainer.total_training_steps", value]]}) == steps


def test_what_is_shown_of_many_steps_warnings_and_pictures_is_the_newest_and_as_large_as_it_may_be(tmp_path):
    rows = [{**metrics_of(step), "step": step, "perf/images_per_s": float(step)} for step in range(1, 31)]
    start = {"at_s": None, "config": []}
    told = {tile["label"]: tile["value"] for tile in tiles(rows, start, {"shown": [], "num_left_out": 0}, "ended")}
    assert told["Samples per second"] == "20.5"
    encoded = {step: [None, "x" * 10] for step in range(40)}
    for most, steps in ((160, pictures.MAX_STEPS), (159, 15), (30, 3), (29, 2), (5, 2)):
        chosen, shown = pictures._fitting(range(40), encoded.__getitem__, most)
        assert len(chosen) == len(shown) == steps and (chosen[0], chosen[-1]) == (0, 39)
    lines = [{"step": step, "level": "WARNING", "text": str(min(step, 204))} for step in range(206)]
    (tmp_path / WARNINGS).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = warnings_of(tmp_path)
    assert found["num_left_out"] == 5 and found["shown"][0]["text"] == "5"
    assert [found["shown"][-1][name] for name in ("count", "first_step", "last_step")] == [2, 204, 205]
    for size, shown in (((64, 64), (64, 64)), ((512, 512), (256, 256)), ((1120, 112), (560, 56))):
        save_noise(tmp_path / "a.png", size, seed=1)
        url = pictures.thumbnail(tmp_path / "a.png")
        assert url is not None
        picture = Image.open(BytesIO(b64decode(url.partition(",")[2])))
        assert picture.size == shown
        assert (size != shown) or picture.tobytes() == Image.open(tmp_path / "a.png").tobytes(), "without loss"


def test_a_step_that_a_run_was_resumed_after_keeps_its_numbers(tmp_path):
    lines = {"step": 2, "reward/mean": 0.5, "val/reward": 0.1}, {"step": 1}, {"step": 2, "val/reward": 0.2}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "reward/mean": 0.5, "val/reward": 0.2}]


def test_shares_of_a_distribution_lie_in_bins_that_all_steps_have(tmp_path):
    make_run(tmp_path)
    found = distributions(tmp_path, 4)
    of_reward = found["rewards"]["reward"]
    assert found["steps"] == [2, 4] and (of_reward["edges"][0], of_reward["edges"][-1]) == (0.0, 1.0)
    for shares, values in zip(of_reward["shares"], ((0.0, 0.25, 1.0), (0.5, 0.75, 1.0)), strict=True):
        bins = [min(len(shares) - 1, int(value * len(shares) + 1e-9)) for value in values]
        assert [number for number, share in enumerate(shares) if share] == bins
        assert sum(shares) == pytest.approx(1, abs=1e-4)


def test_rewards_that_differ_by_rounding_share_a_bin(tmp_path):
    make_run(tmp_path)
    add_groups(tmp_path, 4, rewards=(0.1 + 0.2, 0.3, 0.3))
    add_groups(tmp_path, 2, rewards=(0.3,))
    for shares in distributions(tmp_path, 4)["rewards"]["reward"]["shares"]:
        assert [share for share in shares if share] == [1.0]


def test_a_timeline_shows_its_steps_with_words(tmp_path, monkeypatch):
    make_run(tmp_path)
    found = timelines.timelines(tmp_path)
    assert [entry["step"] for entry in found["steps"]] == [1, 2, 3]
    assert [entry["word"] for entry in found["steps"]].count("slowest") == 1
    last = found["steps"][-1]
    assert {lane["name"] for lane in last["lanes"]} >= {"generator/0", "trainer/0"}
    for entry in found["steps"]:
        assert all(0 <= bar["at"] <= bar["at"] + bar["s"] <= entry["step_s"] * 1.001 for bar in entry["bars"])
    texts = " | ".join(bar["text"] for entry in found["steps"] for bar in entry["bars"])
    assert "generating" in texts and "new weights are awaited" in texts and "staleness_bound" not in texts
    assert {pool["pool"] for pool in last["pools"]} == {"generator", "trainer"}
    lasted = sorted(bar["s"] for bar in last["bars"])
    monkeypatch.setattr(timelines, "MAX_BARS", 3)
    shown = timelines.timelines(tmp_path)["steps"][-1]["bars"]
    assert sorted(bar["s"] for bar in shown) == lasted[-3:], "the longest ones"


def test_a_long_timeline_is_read_from_its_end(tmp_path, monkeypatch):
    make_run(tmp_path)
    size = (tmp_path / NAME).stat().st_size
    monkeypatch.setattr(timelines, "MAX_BYTES", size * 2 // 3)
    found = timelines.timelines(tmp_path)
    assert not found["is_whole"] and [entry["step"] for entry in found["steps"]] == [3], "step 2 is not all there"
    whole = timelines.read_timeline(tmp_path / NAME)
    assert found["steps"][-1]["bars"] and whole.steps == [1, 2, 3]


def test_columns_are_thinned_out_and_keep_validations():
    rows = [{"step": step, "a": step, **({"val/reward": 1.0} if step % 500 == 0 else {})} for step in range(20_001)]
    rows[7]["a"] = float("nan")
    found = columns(rows)
    assert len(found["step"]) <= MAX_ROWS and (found["step"][0], found["step"][-1]) == (0, 20_000)
    assert sum(value is not None for value in found["val/reward"]) == 41
    assert columns(rows[:20])["a"][7] is None
    often = columns([{"step": step, **({"val/reward": 1.0} if step % 2 == 0 else {})} for step in range(2000)])
    assert (len(often["step"]), often["step"][-1]) == (MAX_ROWS, 1999)
    assert [*columns([{"step": 1, "at_s": 9.0, "b": 1.0, "a": 2.0, "val/reward": 0.5}])] == [
        "step",
        "val/reward",
        "b",
        "a",
    ]
    assert len(columns([{"step": 0, **{f"x/{number}": 0.0 for number in range(400)}}])) == MAX_COLUMNS


def test_the_largest_page_stays_below_its_bound(tmp_path):
    """Noise for pictures, more steps, prompts, metrics, warnings and config than are shown."""
    make_run(tmp_path)
    prompts = [f"{number} {HOSTILE * 20}" for number in range(pictures.MAX_PROMPTS + 5)]
    for step in (0, 2, 4):
        add_validation(tmp_path, step, prompts, size=(300, 300))
    wide = {f"area/some_longer_name_of_a_metric_{number}": number / 7 for number in range(MAX_COLUMNS)}
    with open(tmp_path / METRICS, "a", encoding="utf-8") as out:
        for step in range(5, MAX_ROWS + 300):
            out.write(json.dumps({"step": step, **metrics_of(step), **wide}) + "\n")
    append_metrics(tmp_path / METRICS, MAX_ROWS + 300, metrics_of(1))
    data = collect(tmp_path)
    size = len(render(data).encode())
    shown = sum(len(picture) for step in data["validations"]["pictures"] for picture in step)
    assert size < MAX_BYTES, size
    assert size - shown + pictures.VALIDATION_CHARS + pictures.TRAINING_CHARS < MAX_BYTES
    assert next(iter(data["missing"]["left_out"])).startswith("Curves show ")
    assert any("5 more validation prompts" in text for text in data["missing"]["left_out"])


@pytest.mark.parametrize("has_start", [True, False])
def test_a_run_that_just_began_says_what_is_not_there_yet(tmp_path, has_start):
    make_run(tmp_path / "whole")
    began = tmp_path / "began"
    began.mkdir()
    if has_start:
        (began / START).write_text((tmp_path / "whole" / START).read_text())
    else:
        append_metrics(began / METRICS, 0, {"val/reward": 0.5})
    data = collect(began)
    empty = data["missing"]["empty"]
    assert empty.keys() >= {
        "health",
        "speed",
        "distributions",
        "validations",
        "groups",
        "timeline",
        "warnings",
        "metrics",
    }
    assert "trainer.test_freq" in empty["validations"] and "digen.num_logged_groups" in empty["groups"]
    assert ("changes" in empty) == ("config" in empty) == (not has_start) and ("reward" in empty) == has_start
    assert "{{" not in render(data).replace(page.plotly(), "")


def test_a_run_that_a_program_started_shows_what_its_checkpoint_holds(tmp_path):
    append_metrics(tmp_path / METRICS, 1, metrics_of(1))
    assert collect(tmp_path)["start"]["config"] == []
    for seed, step in ((3, 9), (4, 10)):
        file = tmp_path / f"global_step_{step}" / "run.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"config": {"digen": {"seed": seed}}, "versions": {"verl": "0.9.1"}}))
        os.utime(file, (step, step))
    start = collect(tmp_path)["start"]
    assert start["config"] == [["digen.seed", "4"]] and start["versions"] == {"verl": "0.9.1"}
    assert start["changes"] is None


def test_steps_after_the_newest_line_of_metrics_are_of_an_earlier_run(tmp_path):
    make_run(tmp_path)
    add_validation(tmp_path, 100)
    add_groups(tmp_path, 100)
    data = collect(tmp_path)
    assert data["validations"]["steps"][-1] == data["groups"]["steps"][-1] == data["distributions"]["steps"][-1] == 4


def test_a_picture_that_is_gone_or_broken_leaves_a_gap(tmp_path):
    make_run(tmp_path)
    image_path(tmp_path, 2, "val-00000").unlink()
    image_path(tmp_path, 4, "val-00001").write_bytes(b"\x89PNG")
    shown = collect(tmp_path)["validations"]["pictures"]
    assert [[picture is None for picture in step] for step in shown] == [
        [False] * 3,
        [True, False, False],
        [False, True, False],
    ]


def test_the_file_is_replaced_at_once_and_a_failure_leaves_the_old_one(tmp_path, monkeypatch):
    make_run(tmp_path)
    path = tmp_path / REPORT
    write_report(tmp_path, path)
    before = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o644

    def fail(*arguments):
        raise OSError("the disk is full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        write_report(tmp_path, path)
    assert path.read_text() == before and not list(tmp_path.glob(f".{REPORT}*"))


def test_the_command_writes_where_it_is_told(tmp_path, capsys):
    make_run(tmp_path / "run")
    assert cli.main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / REPORT)
    assert cli.main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "own.html")]) == 0
    assert data_of((tmp_path / "own.html").read_text())["heading"]["name"] == "run"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no_such_run"], "RUN must be the folder of a run, its trainer.default_local_dir, with a metrics.jsonl"),
        (["run", "--out", "run"], "--out must be a file in a folder that is there"),
        (["broken"], "line 2 must be a JSON object with a step, got 'nonsense'; delete that line"),
    ],
)
def test_a_bad_command_line_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, words, said):
    make_run(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / METRICS).write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *words]) == 2
    assert capsys.readouterr().err.startswith("digen report: ") and not Path("no_such_run").exists()
    assert cli.main(["report", *words]) == 2 and said in capsys.readouterr().err


def test_a_value_that_another_program_made_null_is_one_that_the_step_does_not_have(tmp_path):
    make_run(tmp_path)
    path = tmp_path / METRICS
    *earlier, last = path.read_text().splitlines(keepends=True)
    shown = []
    for row in ({"step": 4}, dict.fromkeys(json.loads(last)) | {"step": 4}):
        path.write_text("".join((*earlier, json.dumps(row), "\n")))
        shown.append(page.collect(tmp_path))
    assert shown[0] == shown[1]


def test_a_damaged_file_of_a_run_is_named(tmp_path):
    make_run(tmp_path)
    for name, content, form in (
        (START, b"{}", "an object with words, .*, got b'{}'"),
        (END, b"\0\0", "an object with state, reason, got"),
        ("images/step_000000.json", b'{"', "a list, got"),
        ("images/train_000002.json", b"\xff", "an object with values, got"),
    ):
        path = tmp_path / name
        whole = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} must be JSON, {form}.*; delete it"):
            page.collect(tmp_path)
        path.unlink()
        if whole is not None:
            path.write_bytes(whole)
