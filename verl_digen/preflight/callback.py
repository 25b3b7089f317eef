# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback: one paragraph in place of a traceback; exit code 2 for what cannot run, 1 for what broke.

A run that starts leaves what it was given in its folder (`verl_digen.preflight.start`).
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig

from verl_digen.errors import RunStopped, plain
from verl_digen.preflight.notes import notes
from verl_digen.preflight.rules import check
from verl_digen.preflight.start import save_start


class Preflight(Callback):
    """Hydra callback: one paragraph on stderr and exit code 2 for a config that cannot run."""

    def __init__(self) -> None:
        self._notes: list[str] = []

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check before the run's output folder is made."""
        self._notes = _check_or_exit(config)

    def on_job_start(self, config: DictConfig, *, task_function: Any = None, **kwargs: Any) -> None:
        """Check before each job of a multirun. Hydra makes a warning of what this raises."""
        if config.hydra.mode == RunMode.MULTIRUN:
            self._notes = _check_or_exit(config)
        save_start(config, self._notes)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Print a `RunStopped` of any process as one paragraph, not as a traceback of Ray's."""
        if job_return.status == JobStatus.FAILED and isinstance(job_return._return_value, RunStopped):
            reason = plain(job_return._return_value)
            ray.shutdown()  # ends the workers, and their last log lines come before the reason, not after
            print(f"verl-digen: the run stopped: {reason}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def _check_or_exit(config: DictConfig) -> list[str]:
    """Check, and print the notes -> notes."""
    # Hydra turns an Exception of a callback into a warning and goes on; SystemExit passes.
    try:
        check(config)
    except ValueError as error:
        print(f"verl-digen: this config cannot run.\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    found = notes(config)
    for note in found:
        print(f"verl-digen: {note}", file=sys.stderr, flush=True)
    return found
