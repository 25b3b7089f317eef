# SPDX-License-Identifier: Apache-2.0
"""Runs of the learning curves start: their configs compose and are accepted."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from verl_digen.config import digen_config
from verl_digen.preflight.unknown import unknown_problems

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "research"


@pytest.mark.long
def test_every_curve_composes_and_trains_its_objective_on_the_quick_starts_batch(start, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    curves = importlib.import_module("learning_curves")
    for name, entry in curves.CURVES.items():
        mode = curves.mode_of(name)
        config = start(f"recipe=[{','.join((*curves.QUICKSTART, *mode.recipes))}]", *mode.overrides)
        assert unknown_problems(config) == []
        assert digen_config(config).loss_name == entry.objective, name
        assert config.data.train_batch_size * config.actor_rollout_ref.rollout.n == 96, name
        assert config.actor_rollout_ref.actor.optim.lr == pytest.approx(3e-4), name


def test_stale_curves_compose_with_a_loss_that_takes_older_samples(start, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    curves = importlib.import_module("learning_curves")
    own = [(name, 2, curves.CURVES[name].objective) for name in curves.STALE_OBJECTIVES]
    for name, age, objective in (*own, ("flow_grpo", 3, "tis")):
        mode = curves.mode_of(name, age)
        digen = digen_config(start(f"recipe=[digen_quickstart,{','.join(mode.recipes)}]", *mode.overrides))
        assert (digen.loss_name, digen.staleness.max_versions) == (objective, age)
        assert digen.denominator  # settings that do not fit the objective are refused here
