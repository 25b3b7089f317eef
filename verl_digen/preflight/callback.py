# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback: one paragraph in place of a traceback; exit code 2 for what cannot run, 1 for what broke."""

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


class Preflight(Callback):
    """Hydra callback: one paragraph on stderr and exit code 2 for a config that cannot run."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check before the run's output folder is made."""
        _check_or_exit(config)

    def on_job_start(self, config: DictConfig, *, task_function: Any = None, **kwargs: Any) -> None:
        """Check before each job of a multirun."""
        if config.hydra.mode == RunMode.MULTIRUN:
            _check_or_exit(config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Print a `RunStopped` of any process as one paragraph, not as a traceback of Ray's."""
        if job_return.status == JobStatus.FAILED and isinstance(job_return._return_value, RunStopped):
            reason = plain(job_return._return_value)
            ray.shutdown()  # ends the workers, and their last log lines come before the reason, not after
            print(f"verl-digen: the run stopped: {reason}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def _check_or_exit(config: DictConfig) -> None:
    # Hydra turns an Exception of a callback into a warning and goes on; SystemExit passes.
    try:
        check(config)
    except ValueError as error:
        print(f"verl-digen: this config cannot run.\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None
    for note in notes(config):
        print(f"verl-digen: {note}", file=sys.stderr, flush=True)
