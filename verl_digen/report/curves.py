# SPDX-License-Identifier: Apache-2.0
"""Numbers of a run's steps as columns, and distributions of its rewards, thinned out evenly.

*Invariants:* at most `MAX_ROWS` rows; the first and the last row and, up to half of the rows, every validation are
among them; no value is changed but by rounding to `DIGITS` digits; what is not finite is None.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from verl_digen.observe.health import RULES, VALIDATION
from verl_digen.observe.run_files import TRAINED, group_dir, json_in, pictured_steps, read_lines

MAX_ROWS, MAX_COLUMNS = 500, 250
MAX_DISTRIBUTIONS = 40
"""Steps whose distributions are shown."""
MAX_REWARDS = 12
"""Rewards whose distributions are shown."""
NUM_BINS = 30
DIGITS = 5

Item = TypeVar("Item")


def thinned(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` >= 2 items, evenly spread, with the first and the last."""
    if len(items) <= count:
        return list(items)
    return [items[round(number * (len(items) - 1) / (count - 1))] for number in range(count)]


def rounded(value: float | None) -> float | None:
    """The value with `DIGITS` significant digits; None if it is not finite."""
    return float(f"{value:.{DIGITS}g}") if value is not None and isfinite(value) else None


def read_rows(path: Path) -> list[dict[str, float]]:
    """Rows of a run's metrics.jsonl, by step. ValueError if one has no step. A run that is resumed validates the step
    once more: its newer numbers are taken, beside those that the step has alone."""
    rows: dict[float, dict[str, float]] = {}
    for row in read_lines(path):
        rows[row["step"]] = {**rows.get(row["step"], {}), **row}
    return [rows[step] for step in sorted(rows)]


def columns(rows: Sequence[Mapping[str, float]], most_rows: int = MAX_ROWS) -> dict[str, list[float | None]]:
    """Name -> value of each row that is kept, None where it has none; `step` first."""
    validated = thinned([number for number, row in enumerate(rows) if VALIDATION in row], most_rows // 2)
    others = sorted(set(range(len(rows))).difference(validated))
    kept = [rows[number] for number in sorted({*validated, *thinned(others, most_rows - len(validated))})]
    names = dict.fromkeys(name for row in kept for name in row)
    return {name: [rounded(row.get(name)) for row in kept] for name in _chosen(names)}


def _chosen(names: Iterable[str]) -> list[str]:
    """At most `MAX_COLUMNS` names: those that the page's own plots need first."""
    order = ("step", "reward/", "val/", *(rule.metric for rule in RULES), "perf/", "")
    known = (name for name in names if name != "at_s")
    ranked = sorted(known, key=lambda name: next(n for n, word in enumerate(order) if name.startswith(word)))
    return ranked[:MAX_COLUMNS]


def distributions(run_dir: Path, last_step: int) -> dict[str, Any]:
    """Distributions of the rewards of steps whose groups are shown, up to `last_step`. `num_left_out`: further steps;
    `rewards`: name -> `edges` [NUM_BINS + 1] and `shares`, of each step [NUM_BINS], None where no sample has the
    reward."""
    found = [step for step in pictured_steps(run_dir, TRAINED) if step <= last_step]
    steps = thinned(found, MAX_DISTRIBUTIONS)
    values = [json_in(group_dir(run_dir, step).with_suffix(".json"), "values")["values"] for step in steps]
    names = list(dict.fromkeys(name for of_step in values for name in of_step))[:MAX_REWARDS]
    rewards = {
        name.removeprefix("distribution/"): _binned([of_step.get(name, ()) for of_step in values]) for name in names
    }
    return {"steps": steps, "num_left_out": len(found) - len(steps), "rewards": rewards}


def _binned(of_steps: Sequence[Sequence[float]]) -> dict[str, Any]:
    import numpy as np  # here alone: every `digen` command imports this module

    # rounded: numpy has no bins between values that are equal but for the last bits
    shown = [[one for one in map(rounded, values) if one is not None] for values in of_steps]
    edges, shares = np.histogram_bin_edges([value for values in shown for value in values], NUM_BINS), []
    for values in shown:
        counts, _ = np.histogram(values, edges)
        shares.append([rounded(share) for share in counts / counts.sum()] if counts.sum() else None)
    return {"edges": [rounded(float(edge)) for edge in edges], "shares": shares}
