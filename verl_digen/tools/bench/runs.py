# SPDX-License-Identifier: Apache-2.0
"""One run of verl's own main as a subprocess, and its results, for `digen bench` and `digen doctor`.

*Invariant (tests/bench/test_command.py):* a run that fails, or ends early, is an error with its log's path and last
lines.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_digen.observe.run_files import METRICS, read_lines
from verl_digen.tools.bench.modes import Mode

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
    """Recipes before a mode's, the algorithm's first."""
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


def run_mode(work: BenchWork, mode: Mode, repeat: int, out: Path) -> RunResult:
    """Run one mode to its end.

    Raises:
        RunFailed: see `train`.
    """
    run_dir = run_dir_of(out, mode, repeat).absolute()
    recipe = "+".join((*work.recipes, *mode.recipes))
    started_s = time.monotonic()
    try:
        steps = train(recipe, (*mode.overrides, "digen.report=false", *work.overrides), work.num_steps, run_dir)
    except RunFailed as failed:
        raise RunFailed(f"{mode.name}, repeat {repeat + 1}: {failed}") from None
    return RunResult(mode, repeat, run_dir, steps, time.monotonic() - started_s)


def train(recipe: str, overrides: Sequence[str], num_steps: int, run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """Train in verl's main, in a process of its own, and return the metrics of its steps.

    Args:
        recipe: names joined by "+", the algorithm's first.
        run_dir: new folder; gets `console.log`.

    Raises:
        RunFailed: it ended with an error, or without its steps.
    """
    run_dir.mkdir(parents=True, exist_ok=False)
    log = run_dir / LOG_NAME
    with open(log, "w", encoding="utf-8") as file:
        command = command_of(recipe, overrides, num_steps, run_dir)
        exit_code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    steps = read_steps(run_dir)
    if exit_code == 0 and len(steps) == num_steps:
        return steps
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    stopped = [line.strip() for line in lines if "verl-digen: " in line or "Error" in line]
    raise RunFailed(
        f"exit code {exit_code}, {len(steps)} of {num_steps} steps were done; "
        + "\n".join([*stopped[-1:], f"the end of {log}:", *lines[-NUM_LOG_LINES:]])
    )


def command_of(recipe: str, overrides: Sequence[str], num_steps: int, run_dir: Path) -> list[str]:
    """The command line of a run."""
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo", f"recipe={recipe}"),
        *(f"trainer.total_training_steps={num_steps}", *STEPS_ALONE, *overrides),
        *(f"trainer.default_local_dir={run_dir}", f"hydra.run.dir={run_dir}/hydra"),
    ]


def read_steps(run_dir: Path) -> tuple[Mapping[str, float], ...]:
    """The metrics of a run's steps; empty if it did not get that far."""
    return tuple(row for row in read_lines(run_dir / METRICS) if "perf/step_s" in row)
