# SPDX-License-Identifier: Apache-2.0
"""Runs below a folder, and a line about each: its state, how far it is, its rewards.

*Invariants (tests/report/test_runs.py):* nothing is written, links to folders are not followed.
"""

import fcntl
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from verl_digen.observe.run_files import CHECKPOINT, END, IMAGES, LOCK, METRICS, START, WARNINGS, json_in
from verl_digen.report.curves import VALIDATION, read_rows, rounded, thinned
from verl_digen.report.summary import RECENT, health, planned_steps, read_start
from verl_digen.require import require

MAX_DEPTH = 5
"""Levels of folders below the given one that are searched."""
NO_RUNS = (".", CHECKPOINT, IMAGES, "hydra", "tensorboard")
"""Beginnings of names of folders that hold no runs."""
SILENT_S = 600.0
"""Age of the newest change from which a run counts as gone, where the file system has no locks."""
LEVELS = ("red", "amber", "green")
MAX_POINTS = 60
"""Points of the small line."""


def find_runs(root: Path) -> dict[str, Path]:
    """Name -> folder of each run at or below `root`, by name. The name is the path below `root`."""
    found = {}
    for folder, below, files in os.walk(root):
        path = Path(folder).relative_to(root)
        if METRICS in files or START in files:
            found[path.as_posix() if path.parts else root.resolve().name] = Path(folder)
        below[:] = [name for name in below if len(path.parts) < MAX_DEPTH and not name.startswith(NO_RUNS)]
    return dict(sorted(found.items()))


def require_run(folder: Path, given: str = "RUN") -> None:
    """ValueError unless the folder holds a run, which may be about to begin. `given`: the folder's name where it was
    typed."""
    is_run = (folder / METRICS).is_file() or (folder / START).is_file()
    rule = f"{given} must be the folder of a run, its trainer.default_local_dir, with a {METRICS}"
    require(is_run, rule, str(folder), "name another one; digen watch lists the runs below a folder")


def signature(run_dir: Path) -> tuple[Any, ...]:
    """Value that changes with everything that a page about the run shows."""
    files = [run_dir / name for name in (METRICS, START, END, WARNINGS, IMAGES)]
    known = [path.stat() for path in files if path.exists()]
    return (*((each.st_mtime_ns, each.st_size) for each in known), _is_held(run_dir))


def line_of(name: str, run_dir: Path) -> dict[str, Any]:
    """The line, for lists and tables; a number that is not known yet is None. ValueError: a file of the run is broken.

    `samples_per_s` is the median of the newest steps; `hours` the sum of all steps; `health`: (level, name) of the
    rules that are measured, worst first; `changed_s`: Unix seconds of the newest change; `spark`: rewards, evenly
    spread.
    """
    rows, start = read_rows(run_dir / METRICS), read_start(run_dir)
    trained = [row for row in rows if "reward/mean" in row]
    validated = [row for row in rows if VALIDATION in row]
    best = max(validated, key=lambda row: row[VALIDATION]) if validated else None
    step = int(rows[-1]["step"]) if rows else 0
    steps = planned_steps(start)
    state, reason = state_of(run_dir, step, steps)
    curve = [row["reward/mean"] for row in trained] if len(trained) > 1 else [row[VALIDATION] for row in validated]
    verdicts = health(rows)
    speeds = [row["perf/images_per_s"] for row in trained[-RECENT:] if "perf/images_per_s" in row]
    return {
        "name": name,
        "folder": str(run_dir.resolve()),
        "recipe": ", ".join(start["recipes"]),
        "state": state,
        "reason": reason,
        "step": step,
        "steps": steps,
        "reward": rounded(trained[-1]["reward/mean"]) if trained else None,
        "validation": rounded(validated[-1][VALIDATION]) if validated else None,
        "best": rounded(best[VALIDATION]) if best else None,
        "best_step": int(best["step"]) if best else None,
        "samples_per_s": rounded(median(speeds)) if speeds else None,
        "hours": rounded(totals(rows)[-1][0]) if rows else None,
        "health": [[level, each["name"]] for level in LEVELS for each in verdicts if each["level"] == level],
        "changed_s": _changed_s(run_dir),
        "spark": [rounded(value) for value in thinned(curve, MAX_POINTS)],
    }


def totals(rows: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """(hours, samples) of all steps up to each row, without start, checkpoints and pauses."""
    found, hours, samples = [], 0.0, 0.0
    for row in rows:
        if "perf/step_s" in row and "perf/images_per_s" in row:
            hours += row["perf/step_s"] / 3600
            samples += row["perf/step_s"] * row["perf/images_per_s"]
        found.append((hours, samples))
    return found


def state_of(run_dir: Path, step: int, steps: int | None) -> tuple[str, str]:
    """(state, reason) after `step` of the planned `steps`: from `end.json`, else by the lock on `run.lock` running, or
    starting before there are numbers; else the process is gone."""
    if (run_dir / END).is_file():
        found = json_in(run_dir / END, "state", "reason")
        return found["state"], found["reason"]
    if _is_held(run_dir):
        return ("running" if step else "starting"), ""
    if steps is not None and step >= steps:
        return "ended", ""
    return "stopped", "its process is gone without a word: killed, or out of memory"


def _is_held(run_dir: Path) -> bool:
    """True if a live process holds the folder."""
    try:
        with open(run_dir / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released at once, as the file is closed
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return time.time() - _changed_s(run_dir) < SILENT_S
    return False


def _changed_s(run_dir: Path) -> float:
    return max(path.stat().st_mtime for name in (METRICS, START, END) if (path := run_dir / name).is_file())
