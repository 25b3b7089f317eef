# SPDX-License-Identifier: Apache-2.0
"""Made-up runs, for tests of the reports on runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_digen.tools.bench.modes import MODES
from verl_digen.tools.bench.runs import RunResult


def finished_run(
    mode: str,
    repeat: int,
    step_s: Sequence[float],
    *,
    gradients: Sequence[float] = (),
    projections: Sequence[float] | None = None,
    extra: Mapping[str, float] | None = None,
    run_dir: Path = Path("nowhere"),
) -> RunResult:
    """A run of 10 images per step.

    Args:
        gradients: norm of each step's gradient. projections: of each step's gradient; None: half the norms.
    """
    rows = []
    for index, seconds in enumerate(step_s):
        row = {
            "step": float(index + 1),
            "perf/step_s": seconds,
            "perf/images_per_s": 10 / seconds,
            "reward/mean": 0.5 + 0.01 * index,
            "staleness/samples_0_versions": 10.0,
            **(extra or {}),
        }
        if gradients:
            row["actor/grad_norm"] = gradients[index]
            row["actor/grad_projection"] = gradients[index] / 2 if projections is None else projections[index]
        rows.append(row)
    return RunResult(MODES[mode], repeat, run_dir, tuple(rows), wall_s=40.0)
