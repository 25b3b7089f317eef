# SPDX-License-Identifier: Apache-2.0
"""One run of verl's own main as a subprocess, and its results.

*Invariant (tests/bench/test_command.py):* a run that fails, or ends early, is an error with its log's path and last
lines.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from verl_digen.bench.modes import Mode

LOG_NAME = "console.log"
STEPS_ALONE = (
    *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"),
    *("trainer.resume_mode=disable", "trainer.logger=[]"),
)
"""Overrides of a run whose steps are all that is asked for: no validation, checkpoint or logger."""
NUM_LOG_LINES = 20
"""Number of lines of the log that are shown if a run fails."""


class RunFailed(RuntimeError):
    """A run ended with an error, or without its steps."""


@dataclass(frozen=True)
class BenchWork:
    """The work of every mode."""

    recipes: tuple[str, ...]
    """Recipes before those of a mode, the algorithm's first."""
    overrides: tuple[str, ...]
    """Overrides that are given last, so they win over the mode's."""
    num_steps: int


@dataclass(frozen=True)
class RunResult:
    """A finished run."""

    mode: Mode
    repeat: int
    run_dir: Path
    steps: tuple[Mapping[str, float], ...]
    """The metrics of each step, from `metrics.jsonl`."""
    wall_s: float
    """Wall time of the run, start-up included."""


def run_dir_of(out: Path, mode: Mode, repeat: int) -> Path:
    """Folder of a run."""
    return out / f"{mode.name}-{repeat + 1}"


def command_of(work: BenchWork, mode: Mode, run_dir: Path) -> list[str]:
    """The command line of a run."""
    recipes = "+".join((*work.recipes, *mode.recipes))
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"recipe={recipes}",
        *mode.overrides,
        f"trainer.total_training_steps={work.num_steps}",
        *STEPS_ALONE,
        "digen.report=false",
        *work.overrides,
        f"trainer.default_local_dir={run_dir}",
        f"hydra.run.dir={run_dir}/hydra",
    ]


def run_mode(work: BenchWork, mode: Mode, repeat: int, out: Path) -> RunResult:
    """Run one mode to its end.

    Raises:
        RunFailed: it ended with an error, or without its steps.
    """
    run_dir = run_dir_of(out, mode, repeat).absolute()
    run_dir.mkdir(parents=True, exist_ok=False)
    log = run_dir / LOG_NAME
    started_s = time.monotonic()
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(command_of(work, mode, run_dir), stdout=file, stderr=subprocess.STDOUT, check=False)
    return outcome_of(
        mode,
        repeat,
        run_dir,
        exit_code=done.returncode,
        num_steps=work.num_steps,
        wall_s=time.monotonic() - started_s,
    )


def outcome_of(mode: Mode, repeat: int, run_dir: Path, *, exit_code: int, num_steps: int, wall_s: float) -> RunResult:
    """Read the results of an ended run from its folder.

    Raises:
        RunFailed: see `run_mode`.
    """
    name, log = f"{mode.name}, repeat {repeat + 1}", run_dir / LOG_NAME
    if exit_code != 0:
        raise RunFailed(f"{name}: exit code {exit_code}; {_end_of(log)}")
    steps = read_steps(run_dir)
    if len(steps) != num_steps:
        raise RunFailed(f"{name}: {len(steps)} of {num_steps} steps were done; {_end_of(log)}")
    return RunResult(mode, repeat, run_dir, steps, wall_s)


def read_rows(run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """All lines of a run's metrics, a validation before the first step included; empty if it did not get that far."""
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        return ()
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def read_steps(run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """The metrics of a run's steps; empty if it did not get that far."""
    return tuple(row for row in read_rows(run_dir) if "perf/step_s" in row)


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join([f"the end of {log}:", *lines[-NUM_LOG_LINES:]])
