# SPDX-License-Identifier: Apache-2.0
"""Learning curves: the list of runs, reading them, the table; and the page that shows them."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl_digen.algorithms.objectives import default_config, find_objective, objective_names, policy_loss
from verl_digen.algorithms.rows import Metric

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs" / "algorithms"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Both scripts, imported as they import each other."""
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "research"))
    return SimpleNamespace(**{name: importlib.import_module(f"learning_{name}") for name in ("curves", "report")})


def test_every_registered_objective_has_a_curve_or_a_reason(scripts):
    own = {name for name in objective_names() if find_objective(name).compute.__module__.startswith("verl_digen.")}
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
