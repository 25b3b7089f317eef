# SPDX-License-Identifier: Apache-2.0
"""Output of the driver for people after each step: metrics, pictures, warnings, the console line, the report.

Who waits: the end of the run, for pictures and report. Bound: `digen.deadlines.setup_s` each.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig
from ray.exceptions import RayError

from verl_digen.algorithms.objectives import clips_recorded
from verl_digen.config import DigenConfig
from verl_digen.errors import describe
from verl_digen.observe.group_pictures import best_and_worst, is_group_logged, is_step_logged
from verl_digen.observe.health import Health, Verdict
from verl_digen.observe.images import Shown, save_grid
from verl_digen.observe.run_files import (
    METRICS,
    REPORT,
    WARNINGS,
    WarningsFile,
    append_line,
    group_dir,
    keep_until,
    read_lines,
    replace_text,
)
from verl_digen.observe.trackers import log_to_tensorboard, log_to_wandb
from verl_digen.report.page import refresh_report
from verl_digen.report.summary import duration
from verl_digen.reward.named import has_custom
from verl_digen.store.keys import group_number
from verl_digen.types import SampleTag

logger = logging.getLogger(__name__)

PICTURES = "train/best_and_worst"
LOGGER = "verl_digen"
"""Logger whose warnings are kept."""
MIN_INTERVAL_S = 60.0
"""Time between two starts of the report."""
MAX_SHARE = 0.05
"""Most of one core's time that writing the report takes."""


def begin_beside(work: Callable[..., Any], *arguments: Any) -> Future[Any]:
    """Start a task beside the run."""
    return ray.remote(num_cpus=0)(work).remote(*arguments).future()


class Beside:
    """A task beside the run, one at a time, that writes `what`. `wait_s` bounds the wait for it; `remedy` ends the
    warning of one that failed."""

    def __init__(self, what: object, wait_s: float, remedy: str = ""):
        self._what, self._wait_s, self._remedy = what, wait_s, remedy
        self._task: Future[Any] | None = None

    @property
    def is_running(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, work: Callable[..., Any], *arguments: Any) -> None:
        """Start the task, once the one before has ended."""
        self.finish()
        self._task = begin_beside(work, *arguments)

    def finish(self) -> Any:
        """Wait for the task -> its result; None without one, and if it failed."""
        task, self._task = self._task, None
        try:
            return None if task is None else task.result(self._wait_s)
        except (RayError, TimeoutError) as error:
            logger.warning("%s could not be written (%s); the run goes on%s", self._what, describe(error), self._remedy)


def distributions(tags: Collection[SampleTag], rewards: Iterable[str]) -> dict[str, list[float]]:
    """`distribution/*`: values of the samples of a step, of the reward and of each part that scored any of them."""
    parts = {name: [tag.parts[name] for tag in tags if name in tag.parts] for name in rewards}
    return {
        "distribution/reward": [tag.reward for tag in tags],
        **{f"distribution/{name}": values for name, values in parts.items() if values},
    }


def draw(
    run_dir: Path, step: int, shown: Sequence[Shown], values: Mapping[str, Sequence[float]], to_tensorboard: bool
) -> None:
    """Draw the grid, and write what it shows and `values` beside it; to TensorBoard too, into a folder of their own."""
    grid = group_dir(run_dir, step).with_suffix(".png")
    entries = [{"file": entry.path.name, "prompt": entry.prompt, "reward": entry.reward} for entry in shown]
    grid.parent.mkdir(parents=True, exist_ok=True)
    replace_text(grid.with_suffix(".json"), json.dumps({"shown": entries, "values": dict(values)}))
    if shown:
        save_grid([(f"training groups of step {step}: best and worst", shown)], grid)
    if to_tensorboard:
        log_to_tensorboard(run_dir / "tensorboard" / "training", step, {PICTURES: grid} if shown else {}, values, {})


class RunOutput:
    """Writer of a run's output.

    After a step whose groups are shown it has their best and worst samples, and how each reward is distributed. W&B
    gets each picture or video by itself, TensorBoard and `RUN_DIR/images/train_000010.png` the grid, and the file
    `.json` beside that is read by the run's report. Files come from the agent loop workers
    (`verl_digen.observe.group_pictures`). A task beside the run draws the grid and writes TensorBoard's files; the next
    such step waits for it.
    """

    def __init__(self, config: DictConfig, digen: DigenConfig, run_dir: Path):
        self._metrics_path = run_dir / METRICS
        self._warnings = WarningsFile(run_dir / WARNINGS)
        logging.getLogger(LOGGER).addHandler(self._warnings)
        self._config, self._digen, self._run_dir = config, digen, run_dir
        self.drawing = Beside(f"the last {PICTURES}", digen.deadlines.setup_s)
        self._health, self._told = Health(), set[str]()
        self._report = RunReport(run_dir, wait_s=digen.deadlines.setup_s) if digen.report else None

    @cached_property
    def clip_width(self) -> float | None:
        """Distance from 1 at which the loss clips a ratio to recorded log-probs; None if it clips none. Known from the
        first step on: a user's objective is not registered before the workers are there."""
        digen = self._digen
        if not clips_recorded(digen.loss_name, digen.loss_settings, digen.denominator):
            return None
        return min(digen.loss_settings.clip_widths.values())

    def keep_until(self, step: int) -> list[dict[str, Any]]:
        """Drop what a run resumed after `step` repeats, 0: all -> the lines of `metrics.jsonl` that are left."""
        keep_until(self._metrics_path, step)
        rows = read_lines(self._metrics_path)
        for row in rows:
            self._health.observe(row)
        self._turned_red()  # said before
        self._warnings.keep_until(step)
        self._warnings.step = step
        return rows

    def on_step(
        self,
        step: int,
        metrics: Mapping[str, Any],
        samples: Mapping[str, SampleTag],
        wandb: Any | None,
        *,
        num_steps: int,
        remaining_s: float,
    ) -> None:
        """Write a step's output; `samples`: key -> tag of each trained one, `wandb`: the module, if the run logs
        there."""
        self._warnings.step = step
        if is_step_logged(self._digen, step):
            self._show(step, samples, wandb)
        append_metrics(self._metrics_path, step, metrics)
        self._health.observe(metrics)
        for verdict in self._turned_red():
            logger.warning("%s", verdict.warning)
        logger.info(progress_line(metrics, step=step, num_steps=num_steps, remaining_s=remaining_s))
        if self._report is not None:
            self._report.refresh()

    def _show(self, step: int, samples: Mapping[str, SampleTag], wandb: Any | None) -> None:
        """Show groups of a step, at most `digen.num_logged_groups`."""
        groups: dict[str, dict[int, SampleTag]] = {}
        for tag in samples.values():
            number, num_prompts = group_number(tag.facts.uid), self._config.data.train_batch_size
            if is_group_logged(self._digen, step=step, number=number, num_prompts=num_prompts):
                groups.setdefault(tag.facts.uid, {})[tag.facts.sample_index] = tag
        shown = best_and_worst(self._run_dir, step, dict(sorted(groups.items())[: self._digen.num_logged_groups]))
        rewards = self._digen.reward.weights(has_custom=has_custom(self._config))
        values = distributions(samples.values(), rewards)
        if wandb is not None:
            log_to_wandb(wandb, step, {PICTURES: shown}, values)
        to_tensorboard = "tensorboard" in self._config.trainer.logger
        self.drawing.begin(draw, self._run_dir, step, shown, values, to_tensorboard)

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a validation before the first step; later ones are part of their step's."""
        append_metrics(self._metrics_path, step, metrics)
        self._health.observe(metrics)
        if self._report is not None:
            self._report.refresh()

    def _turned_red(self) -> list[Verdict]:
        """Verdicts that are red for the first time."""
        red = [each for each in self._health.verdicts() if each.level == "red" and each.rule.name not in self._told]
        self._told.update(each.rule.name for each in red)
        return red

    def finish(self) -> None:
        """Wait until everything is written."""
        self.drawing.finish()
        if self._report is not None:
            self._report.finish()
        logging.getLogger(LOGGER).removeHandler(self._warnings)


class RunReport:
    """`RUN_DIR/report.html` while the run goes on: written again and again, whole, by a task beside the run.

    - `refresh` never waits. It starts the task, unless one runs or the last one began too short ago: at least
      `MIN_INTERVAL_S`, and so that writing takes at most `MAX_SHARE` of one core's time.
    - The task imports `verl_digen.report.page`: what that imports costs each run seconds of a core.

    `wait_s` bounds `finish`, which writes once more.
    """

    def __init__(self, run_dir: Path, *, wait_s: float):
        self._run_dir = run_dir
        self._writing = Beside(run_dir / REPORT, wait_s, f", and `digen report {run_dir}` writes it")
        self._due_s = float("-inf")
        self._began_s = 0.0

    def refresh(self) -> None:
        """Start writing, if it is due."""
        if self._writing.is_running:
            return
        self._end()
        if time.monotonic() >= self._due_s:
            self._start()

    def finish(self) -> None:
        """Write the whole run."""
        self._end()
        self._start()
        self._end()

    def _start(self) -> None:
        self._began_s = time.monotonic()
        self._due_s = self._began_s + MIN_INTERVAL_S
        self._writing.begin(refresh_report, self._run_dir)

    def _end(self) -> None:
        """Wait for the task, if there is one, and learn how long it took."""
        if (spent_s := self._writing.finish()) is not None:
            self._due_s = max(self._due_s, self._began_s + spent_s / MAX_SHARE)


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the numbers of a step, `{"step": 12, "at_s": unix seconds, "reward/mean": 0.71}`, without other values."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    append_line(path, {"step": step, "at_s": round(time.time(), 1), **numbers})


def progress_line(metrics: Mapping[str, float], *, step: int, num_steps: int, remaining_s: float) -> str:
    """Line of a step on the console; docs/quickstart.md shows two."""
    return (
        f"step {step}/{num_steps} | reward {metrics['reward/mean']:.3f} ±{metrics['reward/std']:.3f} | "
        f"{metrics['perf/images_per_s']:.1f} images/s | {metrics['perf/step_s']:.2f} s "
        f"(generate {metrics['perf/generate_s']:.2f}, train {metrics['perf/train_s']:.2f}, "
        f"overhead {metrics['perf/overhead_s']:.2f}) | eta {duration(remaining_s)}"
    )
