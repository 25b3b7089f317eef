# SPDX-License-Identifier: Apache-2.0
"""The line about a run, and the comparison of several, without a browser."""

import fcntl
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.report.runs import PROMPTS, add_validation, make_run, metrics_of
from tests.report.test_page import data_of
from verl_digen import Run, cli
from verl_digen.observe.run_files import END, LOCK, METRICS, START
from verl_digen.report.comparison import compare, named
from verl_digen.report.curves import MAX_ROWS
from verl_digen.report.runs import find_runs, line_of, signature
from verl_digen.trainer.run_output import append_metrics


def change_start(run_dir, **sections):
    """Replace sections of a run's `start.json`."""
    path = run_dir / START
    path.write_text(json.dumps({**json.loads(path.read_text()), **sections}))


def test_runs_are_found_at_and_below_a_folder_and_links_are_not_followed(tmp_path):
    root = tmp_path / "outputs"
    make_run(root / "digen" / "a")
    make_run(root / "digen" / "a" / "nested")
    make_run(root / "digen" / "a" / "images" / "no-run")
    make_run(tmp_path / "elsewhere")
    deep = root.joinpath("digen", *"abcd")
    make_run(deep)
    make_run(deep / "e")
    (root / "link").symlink_to(tmp_path / "elsewhere")
    assert find_runs(root) == {name: root / name for name in ("digen/a", "digen/a/b/c/d", "digen/a/nested")}
    assert find_runs(tmp_path / "elsewhere") == {"elsewhere": tmp_path / "elsewhere"}


def test_a_line_says_how_far_a_run_is_and_what_it_reached(tmp_path):
    line = line_of("a", make_run(tmp_path))
    assert (line["step"], line["steps"], line["recipe"]) == (4, 4, "digen_quickstart")
    assert (line["validation"], line["best"], line["best_step"], line["reward"]) == (0.64, 0.64, 4, 0.54)
    assert line["hours"] == pytest.approx(4 * 2.0 / 3600, rel=1e-4) and line["samples_per_s"] == 48.0
    assert line["health"] == []
    append_metrics(tmp_path / METRICS, 5, {**metrics_of(5), "val/reward": 0.5})
    with open(tmp_path / METRICS, "a") as out:
        out.write('{"step": 6, "val/rew')  # being written
    line = line_of("a", tmp_path)
    assert (line["step"], line["validation"], line["best"], line["best_step"]) == (5, 0.5, 0.64, 4)
    assert line["health"][0] == ["red", "Groups without spread"] and ["green", "Gradient"] in line["health"]


def test_the_speed_of_a_run_is_that_of_its_newest_steps(tmp_path):
    for step in range(1, 31):
        append_metrics(tmp_path / METRICS, step, {"reward/mean": 0.5, "perf/images_per_s": float(step)})
    assert line_of("a", tmp_path)["samples_per_s"] == 20.5


def test_the_state_is_that_of_the_end_then_of_the_lock_then_of_the_steps(tmp_path):
    def state():
        line = line_of("a", tmp_path)
        return line["state"], line["reason"]

    make_run(tmp_path, num_steps=4)
    assert state() == ("ended", "")
    change_start(tmp_path, config={"trainer": {"total_training_steps": 60}})
    assert state() == ("stopped", "its process is gone without a word: killed, or out of memory")
    before = signature(tmp_path)
    with open(tmp_path / LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state() == ("running", "") and signature(tmp_path) != before
        (tmp_path / METRICS).unlink()
        assert state() == ("starting", "")
    (tmp_path / END).write_text(json.dumps({"state": "failed", "reason": "no disk"}))
    assert state() == ("failed", "no disk")


def test_without_locks_a_run_that_changed_lately_is_running(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    make_run(tmp_path)
    (tmp_path / LOCK).touch()
    assert line_of("a", tmp_path)["state"] == "running"
    monkeypatch.setattr("verl_digen.report.runs.SILENT_S", 0.0)
    assert line_of("a", tmp_path)["state"] == "ended"


def test_a_comparison_has_all_curves_what_differs_and_the_same_prompts(tmp_path):
    paths = [make_run(tmp_path / name, num_steps=steps) for name, steps in (("a", 4), ("b", 6), ("c", 4))]
    change_start(paths[1], config={"trainer": {"total_training_steps": 4}, "digen": {"loss": {"name": "nft"}}})
    change_start(paths[2], config={}, versions={})
    add_validation(paths[0], 100)  # of an earlier run
    data = compare(named(paths))
    assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
    found = data["runs"][1]["columns"]
    assert found["step"] == [0, 1, 2, 3, 4, 5, 6] and found["val/reward"][-1] == 0.66
    assert found["perf/samples"] == [0, 96, 192, 288, 384, 480, 576]
    assert found["perf/hours"][-1] == pytest.approx(6 * 2 / 3600, rel=1e-4)
    assert data["differences"] == [["digen.empty", "{}", None, None], ["digen.loss.name", "flow_grpo", "nft", None]]
    shown = data["pictures"]
    assert shown["steps"] == [4, 6, 4] and shown["prompts"] == list(PROMPTS)
    assert [reward for _, reward in shown["shown"][1]] == [1.04, 1.06, 1.04]
    assert all(picture.startswith("data:image/webp;base64,") for row in shown["shown"] for picture, _ in row)


def test_curves_of_many_long_runs_are_thinned_out(tmp_path):
    for name in "abcdefgh":
        for step in range(300):
            append_metrics(
                (make_run(tmp_path / name) if step == 0 else tmp_path / name) / METRICS, step + 5, {"x": 1.0}
            )
    data = compare(find_runs(tmp_path))
    assert sum(len(run["columns"]["step"]) for run in data["runs"]) <= 2 * MAX_ROWS


def test_the_command_compares_and_writes_one_file(tmp_path, monkeypatch, capsys):
    for name in ("one/run", "two/run", "c"):
        make_run(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", "one/run", "two/run", "c"]) == 0
    assert capsys.readouterr().out == "comparison.html\n"
    names = [run["name"] for run in data_of((tmp_path / "comparison.html").read_text())["runs"]]
    assert names == [str(tmp_path / "one" / "run"), str(tmp_path / "two" / "run"), "c"]
    assert cli.main(["report", "c", "nowhere"]) == 2
    assert "with a metrics.jsonl, got 'nowhere'; name another one" in capsys.readouterr().err
    assert cli.main(["report", "c", "c"]) == 2 and "RUN must name 2 to 12 folders, got 1" in capsys.readouterr().err


def test_a_run_in_a_notebook_shows_what_its_folder_holds(tmp_path):
    run = Run(make_run(tmp_path / "<a>"))
    assert run.metrics["step"].tolist() == [0, 1, 2, 3, 4] and run.metrics["val/reward"].dropna().tolist()[-1] == 0.64
    assert (run.best, run.summary["state"], run.checkpoints) == (4, "ended", [])
    first = run.pictures[run.best][0]
    assert (first.prompt, first.reward, first.image.size) == (PROMPTS[0], 0.04, (16, 16))
    assert run.config.digen.loss.name == "flow_grpo"
    shown = run._repr_html_()
    assert "<th>best step</th><td>4</td>" in shown and "<a>" not in shown
    append_metrics(run.folder / METRICS, 5, {"val/reward": 0.9})
    assert run.best == 5, "what is read is what is there now"


def test_a_run_says_what_is_missing_and_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match=r"folder must be the folder of a run, .* digen watch lists"):
        Run(tmp_path)
    append_metrics(tmp_path / METRICS, 1, {"reward/mean": 0.5})
    run = Run(str(tmp_path))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: run.best, "must have a validation, got 'none'; set trainer.test_freq"),
        (lambda: run.sample("a"), "RUN must hold checkpoints, .* train with trainer.save_freq > 0"),
        (lambda: run.export(dtype="int4"), "--dtype must be one of bf16, fp16, fp32"),
    ]
    for read, said in cases:
        with pytest.raises(ValueError, match=said):
            read()
