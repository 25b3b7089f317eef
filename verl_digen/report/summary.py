# SPDX-License-Identifier: Apache-2.0
"""Head of the page: the run's name and what it trains, and its few most important numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from verl_digen.report.curves import VALIDATION
from verl_digen.report.start import value_of

RECENT = 20
"""Newest steps whose median is shown as the speed."""
FACTS = (
    ("model", "actor_rollout_ref.model.path"),
    ("objective", "digen.loss.name"),
    ("prompts per step", "data.train_batch_size"),
    ("samples per prompt", "actor_rollout_ref.rollout.n"),
    ("LoRA rank", "actor_rollout_ref.model.lora_rank"),
)


def heading(run_dir: Path, start: dict[str, Any]) -> dict[str, Any]:
    """Name of the run, and (word, value) of what it trains."""
    facts = [["recipe", ", ".join(start["recipes"])]] if start["recipes"] else []
    facts += [[word, value] for word, key in FACTS if (value := value_of(start, key)) not in (None, "0")]
    return {"name": run_dir.resolve().name, "folder": str(run_dir.resolve()), "facts": facts}


def tiles(rows: Sequence[Mapping[str, float]], start: dict[str, Any], warnings: dict[str, Any]) -> list[dict[str, str]]:
    """Tiles of `label`, `value` and `detail`; those that have a value."""
    trained = [row for row in rows if "reward/mean" in row]
    shown = [*_validation(rows), *_training(trained, start), *_speed(trained)]
    count = len(warnings["shown"]) + warnings["num_left_out"]
    if not count and start["changes"] is None:  # a run of an older version, which records none
        return shown
    return [*shown, _tile("Warnings", str(count), "see below" if count else "none from the driver")]


def _tile(label: str, value: str, detail: str) -> dict[str, str]:
    return {"label": label, "value": value, "detail": detail}


def _validation(rows: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    validated = [(int(row["step"]), row[VALIDATION]) for row in rows if VALIDATION in row]
    if not validated:
        return []
    (first_step, first), (last_step, last) = validated[0], validated[-1]
    best_step, best = max(validated, key=lambda entry: entry[1])
    if first_step == last_step:
        return [_tile("Validation reward", _number(last), f"after step {last_step}")]
    return [
        _tile("Validation reward", _number(last), f"{last - first:+.3g} since step {first_step} ({_number(first)})"),
        _tile("Best validation", _number(best), f"after step {best_step} of {len(validated)} validations"),
    ]


def _training(trained: Sequence[Mapping[str, float]], start: dict[str, Any]) -> list[dict[str, str]]:
    if not trained:
        return []
    last = trained[-1]
    total = value_of(start, "trainer.total_training_steps")
    return [
        _tile("Training reward", _number(last["reward/mean"]), f"± {last['reward/std']:.3g} over its samples"),
        _tile("Steps", str(int(last["step"])), f"of {total}" if total else "so far"),
    ]


def _speed(trained: Sequence[Mapping[str, float]]) -> list[dict[str, str]]:
    recent = trained[-RECENT:]
    if not recent:
        return []
    per_s, step_s = (median(row[name] for row in recent) for name in ("perf/images_per_s", "perf/step_s"))
    shown = [_tile("Samples per second", _number(per_s), f"{_number(step_s)} s a step, newest {len(recent)}")]
    idle = {
        name.removeprefix("perf/bubble_fraction/"): median(row[name] for row in recent if name in row)
        for name in recent[-1]
        if name.startswith("perf/bubble_fraction/")
    }
    if idle:
        shares = " · ".join(f"{pool} {share:.0%}" for pool, share in idle.items())
        shown.append(_tile("Idle", f"{max(idle.values()):.0%}", shares))
    return shown


def _number(value: float) -> str:
    """Four significant digits, thousands apart."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
