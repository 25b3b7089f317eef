# SPDX-License-Identifier: Apache-2.0
"""Several runs on one page: rewards over each other, differences of their configs, pictures of the same prompts.

*Invariant:* however many runs and steps there are, their curves have at most 2 x `curves.MAX_ROWS` rows together.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_digen.observe.run_files import METRICS, VALIDATED, image_path, pictured_steps, step_dir
from verl_digen.report.curves import MAX_ROWS, columns, read_rows, rounded
from verl_digen.report.page import written_now
from verl_digen.report.pictures import MAX_PROMPT_CHARS, entries, thumbnail
from verl_digen.report.runs import line_of, require_run, totals
from verl_digen.report.summary import read_start
from verl_digen.require import require

MAX_RUNS = 12
MAX_PROMPTS = 12
"""Prompts whose pictures are shown."""


def named(run_dirs: Sequence[Path]) -> dict[str, Path]:
    """Name -> folder; the name is the folder's own, or the whole path where two are equal."""
    own = [path.resolve().name for path in run_dirs]
    return {
        name if own.count(name) == 1 else str(path.resolve()): path for name, path in zip(own, run_dirs, strict=True)
    }


def compare(runs: Mapping[str, Path]) -> dict[str, Any]:
    """All that the page shows of the runs, name -> folder. ValueError: fewer than 2 or more than `MAX_RUNS`, a folder
    is no run's, or a file in it is broken."""
    require(2 <= len(runs) <= MAX_RUNS, f"RUN must name 2 to {MAX_RUNS} folders", len(runs), "name other folders")
    for path in runs.values():
        require_run(path)
    rows = {name: read_rows(path / METRICS) for name, path in runs.items()}
    return {
        **written_now(),
        "heading": {"name": " · ".join(runs)},
        "missing": {"empty": {}, "left_out": []},
        "runs": [
            {**line_of(name, path), "columns": _curves(rows[name], MAX_ROWS * 2 // len(runs))}
            for name, path in runs.items()
        ],
        "differences": _differences([read_start(path) for path in runs.values()]),
        "pictures": _pictures([(path, rows[name]) for name, path in runs.items()]),
    }


def _curves(rows: Sequence[Mapping[str, float]], most_rows: int) -> dict[str, list[float | None]]:
    """Columns of a run, with `perf/hours` and `perf/samples` up to each row."""
    summed = zip(rows, totals(rows), strict=True)
    return columns([{**row, "perf/hours": spent, "perf/samples": made} for row, (spent, made) in summed], most_rows)


def _differences(starts: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """[key, value in each run, None where it is not known] of what is not equal in all, by key; versions last."""
    known = [
        {**dict(start["config"]), **{f"~{name}": value for name, value in start["versions"].items()}}
        for start in starts
    ]
    found = []
    for key in sorted({key for of_run in known for key in of_run}):
        values = [of_run.get(key) for of_run in known]
        if len({value for value, of_run in zip(values, known, strict=True) if of_run}) > 1:  # {}: nothing is known
            found.append([f"version of {key[1:]}" if key[0] == "~" else key, *values])
    return found


def _pictures(runs: Sequence[tuple[Path, Sequence[Mapping[str, float]]]]) -> dict[str, Any]:
    """Pictures of the newest validation of each run (`steps`: its step, or None), of `prompts` that all have; `shown`:
    for each prompt (picture, reward) of each run."""
    steps, found = [], []
    for path, rows in runs:
        last_step = int(rows[-1]["step"]) if rows else 0
        known = [step for step in pictured_steps(path, VALIDATED) if step <= last_step]
        steps.append(known[-1] if known else None)
        found.append({entry["prompt"]: entry for entry in entries(step_dir(path, known[-1]))} if known else {})
    prompts = [prompt for prompt in found[0] if all(prompt in of_run for of_run in found)][:MAX_PROMPTS]

    def shown(prompt: str) -> list[list[Any]]:
        each = zip(runs, steps, (of_run[prompt] for of_run in found), strict=True)
        return [
            [thumbnail(image_path(path, step, entry["uid"])), rounded(entry["reward"])]
            for (path, _), step, entry in each
        ]

    return {
        "steps": steps,
        "prompts": [prompt[:MAX_PROMPT_CHARS] for prompt in prompts],
        "shown": [shown(prompt) for prompt in prompts],
    }
