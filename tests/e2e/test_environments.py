# SPDX-License-Identifier: Apache-2.0
"""Episodes through verl's main, on both placements."""

import math
from pathlib import Path

import pytest

from tests.e2e.conftest import SEPARATE, assert_succeeded, run_main, steps_of

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WORLDS = Path(__file__).resolve().parents[1] / "environments" / "worlds.py"
SEPARATELY = ("digen.gap.chunk_size=1", "digen.gap.slots_per_replica=4", "digen.deadlines.answer_s=300")


@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        pytest.param("digen_flowgrpo", (), id="colocated", marks=pytest.mark.grid),
        pytest.param(SEPARATE, SEPARATELY, id="separate pools"),
    ],
)
def test_episodes_of_different_lengths_train(tmp_path: Path, recipe: str, overrides: tuple[str, ...]) -> None:
    run = run_main(
        tmp_path / "run",
        f"digen.environment.path={WORLDS}:Brighter",
        "digen.environment.options={latency_s: 0.05}",
        "digen.environment.max_turns=2",
        "digen.environment.num_workers=2",
        "digen.reward.functions={}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        *overrides,
        recipe=recipe,
    )
    assert_succeeded(run)
    rows = steps_of(run)
    assert rows[0]["episodes/exceeded"] > 0, "later weights differ by rounding, so that pixels end other episodes"
    for row in rows:
        assert 1 < row["episodes/turns_mean"] < 2 and row["episodes/turns_max"] == 2
        assert row["episodes/environment_s"] >= 0.05
        assert row["rollout/log_prob_gap_max"] <= 1e-4, "each turn has its own condition and noise"
        assert row["actor/num_rows"] == 16 * row["episodes/turns_mean"] * 5, "samples x turns x trained steps"
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/grad_norm"])
        assert row["reward/environment"] == row["reward/mean"]
