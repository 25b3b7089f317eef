# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback: one paragraph in place of a traceback; exit code 2 for what cannot run, 1 for what broke.

`RUN_DIR/start.json`: what the newest start of a run was given; read by the run's report.

| key | content |
| --- | --- |
| `words` | the command line after `python -m verl.trainer.main_ppo` |
| `recipes` | names of the recipes |
| `changes` | [key, value of the recipes alone, value of the run] for each value that the other words changed |
| `config` | the whole config, with interpolations resolved |
| `notes` | what was said before the run started |
| `versions` | package -> version |
"""

from __future__ import annotations

import json
import platform
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
from hydra import compose
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from verl_digen.errors import RunStopped, plain
from verl_digen.observe.run_files import START
from verl_digen.preflight.notes import notes
from verl_digen.preflight.recipes import GROUP_WORD, command_line, named_recipes
from verl_digen.preflight.rules import check
from verl_digen.report.start import leaves
from verl_digen.trainer.checkpoint import replace_text
from verl_digen.versions import installed


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


MISSING = "(not there)"
"""Stands for the value of a key that one of two configs does not have."""


def save_start(config: DictConfig, notes: Sequence[str]) -> None:
    """Write the file, while Hydra runs the job.

    Raises:
        OSError: it cannot be written.
    """
    words = command_line(config)
    of_recipes = compose(config.hydra.job.config_name, overrides=[word for word in words if GROUP_WORD.match(word)])
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    found = {
        "words": words,
        "recipes": named_recipes(config),
        "changes": list(changes(of_recipes, config)),
        "config": _plain(config, resolve=True),
        "notes": list(notes),
        "versions": {"python": platform.python_version(), **installed()},
    }
    replace_text(run_dir / START, json.dumps(found, default=str))


def changes(before: DictConfig, after: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value before, value after) of every value that differs; interpolations as they are written."""
    old, new = (dict(leaves("", _plain(config, resolve=False))) for config in (before, after))
    for key in sorted(old.keys() | new.keys()):
        values = old.get(key, MISSING), new.get(key, MISSING)
        if values[0] != values[1]:
            yield key, *values


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """The config as plain values, without Hydra's own section."""
    shown = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values = OmegaConf.to_container(shown, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
