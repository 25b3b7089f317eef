# SPDX-License-Identifier: Apache-2.0
"""Hydra's callback: one paragraph in place of a traceback; exit code 2 for what cannot run, 1 for what broke, 130
after Ctrl-C, 143 after SIGTERM. A run leaves in its folder what it was given (`save_start`), and how it ended."""

import json
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn

import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from ray._private.worker import _post_init_hooks
from ray.exceptions import OutOfMemoryError, RayActorError

from verl_digen.errors import RunStopped, describe, plain
from verl_digen.observe.run_files import END, FOLDER_LINE, REPORT, newest_checkpoint, replace_text, restart
from verl_digen.preflight.rules import check, notes
from verl_digen.preflight.run_folder import claim, save_start
from verl_digen.processes.cluster import fork_workers
from verl_digen.report.page import refresh_report
from verl_digen.require import EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_TERMINATED

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Preflight(Callback):
    """Hydra callback: checks a start, and says how it ended."""

    def __init__(self) -> None:
        self._notes: list[str] = []
        self._lock: IO[str] | None = None
        """Held as long as the run, or the job of a multirun."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Check before the run's output folder is made."""
        self._begin(config)

    def on_job_start(self, config: DictConfig, *, task_function: Any = None, **kwargs: Any) -> None:
        """Check before each job of a multirun. Hydra makes a warning of what this raises."""
        if config.hydra.mode == RunMode.MULTIRUN:
            self._begin(config)
        save_start(config, self._notes)
        # Hydra passes a KeyboardInterrupt on, and Ray raises nothing else out of its waits
        sys.excepthook = partial(_end_interrupted, Path(config.trainer.default_local_dir), sys.excepthook)
        signal.signal(signal.SIGTERM, _terminate)
        _post_init_hooks.append(partial(signal.signal, signal.SIGTERM, _terminate))  # Ray takes the signal at its start

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """Write how the run ended. Print a `RunStopped`, or that a process is lost while the run starts or with verl's
        task runner, as one paragraph, not as a traceback of Ray's."""
        run_dir, error = Path(config.trainer.default_local_dir), job_return._return_value
        if isinstance(error, RayActorError | OutOfMemoryError):
            lost = f"a process is lost ({describe(error)}): look for the reason above, out of memory is common"
            error = RunStopped(lost)
        if job_return.status != JobStatus.FAILED:
            _leave(run_dir, "ended", "")
            if config.hydra.mode == RunMode.MULTIRUN:
                ray.shutdown()  # the next job gets a Ray of its own: the devices of this one stay taken in this
        elif not isinstance(error, RunStopped):
            _leave(run_dir, "failed", describe(error))
        else:
            _stop(run_dir, "failed", str(plain(error)), 1)

    def _begin(self, config: DictConfig) -> None:
        """Check, hold the run's folder, and print the notes."""
        if self._lock is not None:  # of the job before
            self._lock.close()
        # Hydra turns an Exception of a callback into a warning and goes on; SystemExit passes.
        try:
            self._notes, self._lock = checked(config)
        except ValueError as error:
            print(f"verl-digen: this config cannot run.\n{error}", file=sys.stderr)
            if "'examples/" in str(error) and not Path("examples").is_dir():
                print("examples/ is a folder of the repository: start in a clone of it", file=sys.stderr)
            raise SystemExit(EXIT_REFUSED) from None
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            print("verl-digen: interrupted before the run began", file=sys.stderr)
            raise SystemExit(EXIT_INTERRUPTED) from None
        run_dir = config.trainer.default_local_dir
        shown = [f"its report is {run_dir}/{REPORT}"] if config.digen.report else []
        shown = [f"verl-digen: {note}" for note in (*shown, *self._notes)]
        print(f"{FOLDER_LINE}{run_dir}", *shown, sep="\n", file=sys.stderr)
        ray_init = OmegaConf.select(config, "ray_kwargs.ray_init")
        fork_workers({} if ray_init is None else OmegaConf.to_container(ray_init, resolve=True))  # type: ignore[arg-type]


def checked(config: DictConfig) -> tuple[list[str], IO[str]]:
    """Check a start, and claim its folder -> notes, and the lock, which holds while open. Raises ValueError."""
    found = notes(check(config))
    lock, of_folder = claim(config)
    return [*found, *of_folder], lock


def _leave(run_dir: Path, state: str, reason: str) -> None:
    """Write `end.json`, and once more the report of a run that ended early, which shows the time that is left. Without
    them a process that is gone counts as stopped, so a full disk is only reported."""
    try:
        replace_text(run_dir / END, json.dumps({"state": state, "reason": reason}))
        if state != "ended" and (run_dir / REPORT).is_file():
            refresh_report(run_dir)
    except (OSError, ValueError) as error:
        print(f"verl-digen: how the run ended could not be written to {run_dir} ({error})", file=sys.stderr)


def _terminate(number: int, frame: object) -> NoReturn:
    """Handler of SIGTERM: end as at Ctrl-C. Ray raises a KeyboardInterrupt of its own out of its waits, so what tells
    them apart is that the signal is ignored from now on."""
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _end_interrupted(
    run_dir: Path, otherwise: Hook, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Python's excepthook of a run: end at Ctrl-C or SIGTERM with one paragraph; `otherwise` shows other exceptions."""
    if not issubclass(kind, KeyboardInterrupt):
        otherwise(kind, error, trace)
        return
    is_terminated = signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    cause, code = ("SIGTERM", EXIT_TERMINATED) if is_terminated else ("Ctrl-C", EXIT_INTERRUPTED)
    _stop(run_dir, "stopped", cause, code)


def _stop(run_dir: Path, state: str, cause: str, code: int) -> NoReturn:
    """End with one paragraph: why, and how to go on, with the command that was typed."""
    _leave(run_dir, state, cause)
    ray.shutdown()  # ends the workers, and their last log lines come before the paragraph, not after
    try:
        checkpoint = newest_checkpoint(run_dir)
        saved = "no checkpoint is saved yet; this begins again"
        if checkpoint is not None:
            saved = f"{checkpoint} is saved; this continues after it"
        way = f"{saved}: {restart(checkpoint, ['python', *sys.orig_argv[1:]])}"
    except ValueError as error:  # the pointer is damaged
        way = str(error)
    print(f"verl-digen: the run stopped: {cause}; {way}", file=sys.stderr, flush=True)
    raise SystemExit(code)
