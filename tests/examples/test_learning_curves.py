# SPDX-License-Identifier: Apache-2.0
"""Learning curves: the list of runs, reading them, the table; and the page that shows them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_digen.algorithms.metric import Metric
from verl_digen.algorithms.objectives import default_config, find_objective, objective_names, policy_loss
from verl_digen.bench.runs import run_dir_of

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "algorithms"
STEPS = 10


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return SimpleNamespace(**{name: importlib.import_module(f"learning_{name}") for name in ("curves", "report")})


def write_run(run_dir: Path, rewards: list[float], step_s: float = 2.0) -> None:
    """Folder of a run whose validations, every 5 steps, have the rewards; training has 0.1 less."""
    rows = [{"step": 0, "val/reward": rewards[0]}]
    for step in range(1, 5 * (len(rewards) - 1) + 1):
        row = {"step": step, "perf/step_s": step_s, "reward/mean": rewards[-(-step // 5)] - 0.1}
        rows.append(row | ({"val/reward": rewards[step // 5]} if step % 5 == 0 else {}))
    run_dir.mkdir(parents=True)
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def found(scripts: SimpleNamespace, out: Path) -> dict:
    curves: ModuleType = scripts.curves
    return {curve.name: curve for curve in curves.strict_curves(STEPS, out / "runs", out / "timing")}


def test_every_registered_objective_has_a_curve_or_a_reason(scripts):
    own = {name for name in objective_names() if find_objective(name).loss.compute.__module__.startswith("verl_digen.")}
    with_curve = {entry.objective for entry in scripts.curves.CURVES.values()}
    assert with_curve.isdisjoint(scripts.curves.OMITTED)
    assert with_curve | set(scripts.curves.OMITTED) == own


def gradient(name: str) -> torch.Tensor:
    """[N] gradient by the log-probs where policy, old policy and generation agree; rewards are above 0."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8, generator=generator)
    log_prob = old.clone().requires_grad_()
    inputs = {
        **{"log_prob": log_prob, "old_log_prob": old, "behaviour_log_prob": old, "num_rows": 8},
        **{"advantage": torch.randn(8, generator=generator), "reward": torch.rand(8, generator=generator)},
    }
    output = policy_loss(name, inputs, default_config(name))
    assert all(isinstance(metric, Metric) for metric in output.metrics.values())
    output.loss.backward()
    assert log_prob.grad is not None
    return log_prob.grad


def test_objectives_without_a_curve_have_the_gradient_of_flow_grpo_in_the_first_step(scripts):
    expected = gradient("flow_grpo")
    assert expected.abs().min() > 0
    for name in (name for name, reason in scripts.curves.OMITTED.items() if "flow_grpo" in reason):
        torch.testing.assert_close(gradient(name), expected)


def test_a_longer_run_is_cut_and_a_shorter_one_is_no_point(scripts, tmp_path):
    for seed, rewards in enumerate(([0.5, 0.6, 0.8, 0.9], [0.7, 0.8, 0.9], [0.5, 0.9])):
        write_run(run_dir_of(tmp_path / "runs", scripts.curves.mode_of("awm"), seed), rewards)
    curve = found(scripts, tmp_path)["awm"]
    assert sorted(curve.runs) == [0, 1] and [len(run.train) for run in curve.runs.values()] == [10, 10]
    assert scripts.report.validations(curve) == [(0, [0.5, 0.7]), (5, [0.6, 0.8]), (10, [0.8, 0.9])]
    assert scripts.report.steps_to(curve, 0.7) == 5  # the mean over the seeds
    assert scripts.report.steps_to(curve, 0.9) is None


def test_a_curve_whose_name_begins_like_anothers_has_its_own_runs(scripts, tmp_path):
    for name, age, reward in (("flow_grpo", None, 0.6), ("flow_grpo", 0, 0.7), ("flow_grpo", 2, 0.8)):
        write_run(run_dir_of(tmp_path / "runs", scripts.curves.mode_of(name, age), 0), [0.5, 0.6, reward])
    assert found(scripts, tmp_path)["flow_grpo"].runs[0].val[-1] == (10, 0.6)
    stale = scripts.curves.stale_curves(STEPS, tmp_path / "runs", tmp_path / "timing")
    last = {curve.name: curve.runs[0].val[-1][1] for curve in stale}
    assert last == {"flow_grpo, strict": 0.7, "flow_grpo, at most 2 versions old, tis": 0.8}


def test_seconds_are_those_of_the_timed_run_where_there_is_one(scripts, tmp_path):
    for name in ("awm", "dgpo"):
        write_run(run_dir_of(tmp_path / "runs", scripts.curves.mode_of(name), 0), [0.5, 0.6, 0.8], step_s=7.0)
    write_run(run_dir_of(tmp_path / "timing", scripts.curves.mode_of("dgpo"), 0), [0.0] * 4, step_s=3.0)
    curves = found(scripts, tmp_path)
    assert [(curve.step_s, curve.is_timed) for curve in curves.values()] == [(7.0, False), (3.0, True)]
    rows = scripts.report.table(list(curves.values())).splitlines()
    assert rows[2] == "| `awm` | 1 | 0.500 | 0.800 | 0.700 | 10 | 7.00* | 70 |"
    assert rows[3] == "| `dgpo` | 1 | 0.500 | 0.800 | 0.700 | 10 | 3.00 | 30 |"
    assert rows[-1].startswith("\\* ")


def test_finished_runs_are_not_run_again_and_one_that_was_cut_short_is(scripts, tmp_path, monkeypatch, capsys):
    mode, ran = scripts.curves.mode_of("awm"), []

    def run(work, mode, seed, out):
        ran.append((seed, work.num_steps, work.overrides))
        assert (
            len(scripts.curves.read_run(run_dir_of(tmp_path, mode, 0)).train) == 10
        )  # kept until the longer run ended
        write_run(run_dir_of(out, mode, seed), [0.5] * (work.num_steps // 5 + 1))
        return SimpleNamespace(wall_s=60.0)

    monkeypatch.setattr(scripts.curves, "run_mode", run)
    write_run(run_dir_of(tmp_path, mode, 0), [0.5, 0.6, 0.8])
    write_run(run_dir_of(tmp_path / "unfinished", mode, 1), [0.5, 0.6])
    for _ in range(2):
        assert scripts.curves.run_all([mode], range(2), STEPS, tmp_path, validates=True) == []
    assert ran == [(1, STEPS, ("digen.seed=1", "trainer.test_freq=5", "trainer.val_before_train=true"))]
    assert f"{run_dir_of(tmp_path / 'unfinished', mode, 1)} did not end" in capsys.readouterr().out
    assert scripts.curves.run_all([mode], [0], 15, tmp_path, validates=True) == []
    assert len(scripts.curves.read_run(run_dir_of(tmp_path, mode, 0)).train) == 15


def test_a_run_that_fails_does_not_keep_the_others_from_running(scripts, tmp_path, monkeypatch):
    def run(work, mode, seed, out):
        if mode.name == "awm":
            raise scripts.curves.RunFailed("no memory")
        write_run(run_dir_of(out, mode, seed), [0.5, 0.6, 0.8])
        return SimpleNamespace(wall_s=60.0)

    monkeypatch.setattr(scripts.curves, "run_mode", run)
    modes = [scripts.curves.mode_of(name) for name in ("awm", "dgpo")]
    assert scripts.curves.run_all(modes, [0], STEPS, tmp_path, validates=True) == ["no memory"]
    assert (tmp_path / "dgpo-1").is_dir()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--objectives", "awm,nft"], "--objectives must be among .*awm.*, got nft"),
        (["--steps", "12"], "--steps must be a multiple of 5"),
        (["--staleness", "0"], "--staleness must be >= 1 version, got 0"),
        (["--seeds", "0"], "--seeds must be >= 1, got 0"),
    ],
)
def test_a_wrong_argument_is_refused(scripts, capsys, words, message):
    with pytest.raises(SystemExit):
        scripts.curves.parse_args(words)
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCS.glob("*.json")))
def test_the_pages_table_is_that_of_its_points(scripts, name):
    curves = scripts.report.from_json(json.loads((DOCS / f"{name}.json").read_text()))
    page = (DOCS / "learning.md").read_text()
    assert scripts.report.put_table(page, name, scripts.report.table(curves)) == page
    assert f"({name}.png)" in page and (DOCS / f"{name}.png").is_file()


def test_runs_as_long_as_the_quick_start_have_a_report_of_their_own(scripts, tmp_path, monkeypatch):
    runs = {"flow_grpo": [0.5] * 13, "awm": [0.6] * 3}
    for name, rewards in runs.items():
        write_run(run_dir_of(tmp_path / "runs", scripts.curves.mode_of(name), 0), rewards)
    monkeypatch.setattr("sys.argv", ["learning_curves.py", "--no-runs", "--steps", "10", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"^0$"):
        scripts.curves.main()
    points = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("learning", "learning_long")}
    assert [curve["name"] for curve in points["learning"]["curves"]] == ["flow_grpo", "awm"]
    assert [curve["name"] for curve in points["learning_long"]["curves"]] == ["flow_grpo"]
    assert (points["learning"]["steps"], points["learning_long"]["steps"]) == (10, 60)
    assert not (tmp_path / "learning_stale.json").exists()


def test_the_report_of_a_folder_is_written_into_the_page(scripts, tmp_path):
    write_run(run_dir_of(tmp_path / "runs", scripts.curves.mode_of("flow_grpo"), 0), [0.5, 0.6, 0.8])
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "learning.md").write_text("before\n<!-- learning -->\nold\n<!-- end -->\nafter\n")
    scripts.report.write_report(list(found(scripts, tmp_path).values()), STEPS, tmp_path, "learning", docs)
    page = (docs / "learning.md").read_text()
    assert page.startswith("before\n<!-- learning -->\n| objective ") and page.endswith("<!-- end -->\nafter\n")
    assert "old" not in page and "| `flow_grpo` | 1 | 0.500 | 0.800 |" in page
    assert (docs / "learning.png").stat().st_size > 10_000
    with pytest.raises(ValueError, match="must have the lines <!-- learning_stale -->"):
        scripts.report.put_table(page, "learning_stale", "")
