# SPDX-License-Identifier: Apache-2.0
"""Learning curves: the list of runs, reading them, the table; and the page that shows them."""

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from verl_digen.algorithms.metric import Metric
from verl_digen.algorithms.objectives import default_config, find_objective, objective_names, policy_loss
from verl_digen.tools.bench.runs import run_dir_of

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "algorithms"
STEPS = 10


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "research"))
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


@pytest.mark.parametrize("name", sorted(path.stem for path in DOCS.glob("*.json")))
def test_the_pages_table_is_that_of_its_points(scripts, name):
    curves = scripts.report.from_json(json.loads((DOCS / f"{name}.json").read_text()))
    page = (DOCS / "learning.md").read_text()
    assert scripts.report.put_table(page, name, scripts.report.table(curves)) == page
    assert f"({name}.png)" in page and (DOCS / f"{name}.png").is_file()


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
