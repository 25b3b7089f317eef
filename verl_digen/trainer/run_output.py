# SPDX-License-Identifier: Apache-2.0
"""Output of the driver for people after each step: metrics, pictures, remarks, warnings, the console line, the report.

    on_step -> pictures of training groups, line of metrics.jsonl, remarks, console line, report (once a minute)

Who waits: the end of the run, for pictures and report. Bound: `digen.deadlines.setup_s` each.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl_digen.algorithms.objectives import clips_recorded
from verl_digen.config import DigenConfig
from verl_digen.observe.numerics import FirstSteps
from verl_digen.observe.run_files import METRICS, WARNINGS, WarningsFile, append_line, keep_until
from verl_digen.trainer.run_report import RunReport
from verl_digen.trainer.training_pictures import TrainingPictures
from verl_digen.types import SampleTag

logger = logging.getLogger(__name__)
LOGGER = "verl_digen"
"""Logger whose warnings are kept."""


class RunOutput:
    """See the module."""

    def __init__(
        self,
        run_dir: Path,
        pictures: TrainingPictures,
        digen: DigenConfig,
    ):
        self._metrics_path = run_dir / METRICS
        self._warnings = WarningsFile(run_dir / WARNINGS)
        logging.getLogger(LOGGER).addHandler(self._warnings)
        self._pictures, self._digen = pictures, digen
        self._report = RunReport(run_dir, wait_s=digen.deadlines.setup_s) if digen.report else None

    @classmethod
    def of_run(cls, config: DictConfig, digen: DigenConfig, run_dir: Path) -> RunOutput:
        """The output of a run's config."""
        return cls(run_dir, TrainingPictures.of_run(config, digen, run_dir), digen)

    @cached_property
    def _first_steps(self) -> FirstSteps:
        """Made by the first step: an objective of the user's own is not registered before the workers are there."""
        digen = self._digen
        is_recorded = clips_recorded(digen.loss_name, digen.loss_settings, digen.denominator)
        return FirstSteps(digen.loss_settings.clip_widths, is_recorded=is_recorded)

    def keep_until(self, step: int) -> None:
        """Drop what a run resumed after `step` repeats; 0 drops all."""
        keep_until(self._metrics_path, step)
        self._warnings.keep_until(step)
        self._warnings.step = step

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
        """Write a step's output.

        Args:
            samples: key -> tag of each trained sample.
            wandb: the module, if the run logs there.
            num_steps: steps of the whole run.
            remaining_s: estimate of the time to its end.
        """
        self._warnings.step = step
        self._pictures.log(step, samples, wandb)
        append_metrics(self._metrics_path, step, metrics)
        for remark in self._first_steps.observe(metrics):
            logger.log(logging.WARNING if remark.is_warning else logging.INFO, "%s", remark.text)
        logger.info(progress_line(metrics, step=step, num_steps=num_steps, remaining_s=remaining_s))
        if self._report is not None:
            self._report.refresh()

    def on_validation(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the numbers of a validation before the first step; those of later ones are part of their step's."""
        append_metrics(self._metrics_path, step, metrics)
        if self._report is not None:
            self._report.refresh()

    def finish(self) -> None:
        """Wait until everything is written."""
        self._pictures.finish()
        if self._report is not None:
            self._report.finish()
        logging.getLogger(LOGGER).removeHandler(self._warnings)


def append_metrics(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Append the numbers of a step, `{"step": 12, "reward/mean": 0.71, ...}`; other values are left out."""
    numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, Real)}
    append_line(path, {"step": step, **numbers})


def progress_line(metrics: Mapping[str, float], *, step: int, num_steps: int, remaining_s: float) -> str:
    """E.g. `step 12/60 | reward 0.712 +-0.081 | 38.2 images/s | 2.51 s (generate 0.9, train 1.4) | eta 2m01s`."""
    return (
        f"step {step}/{num_steps} | reward {metrics['reward/mean']:.3f} ±{metrics['reward/std']:.3f} | "
        f"{metrics['perf/images_per_s']:.1f} images/s | {metrics['perf/step_s']:.2f} s "
        f"(generate {metrics['perf/generate_s']:.2f}, train {metrics['perf/train_s']:.2f}, "
        f"overhead {metrics['perf/overhead_s']:.2f}) | eta {duration(remaining_s)}"
    )


def duration(seconds: float) -> str:
    """`45s`, `2m05s`, `3h07m`."""
    total = round(max(0.0, seconds))
    if total < 60:
        return f"{total}s"
    if total < 3600:
        return f"{total // 60}m{total % 60:02d}s"
    return f"{total // 3600}h{total % 3600 // 60:02d}m"
