# SPDX-License-Identifier: Apache-2.0
"""A run of verl's main in a process of its own: what `Console` picks goes to `show`, every line from the first one on
to the run's `console.log`.

The first Ctrl-C, once the run trains, ends it after its step, with a checkpoint where `trainer.save_freq` > 0. The
second one, the first one while it starts, SIGTERM and SIGHUP (not under nohup) end it at once; it is killed after
`KILL_AFTER_S`, or by one more. The process has a session of its own: a terminal's Ctrl-C reaches only this one.
"""

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from verl_digen.observe.run_files import FOLDER_LINE, LOG, METRICS, REPORT, STOP, newest_checkpoint, read_lines, restart
from verl_digen.require import EXIT_REFUSED

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
PROCESS = re.compile(
    r"^\((?:(?P<name>[^()]*?) )?pid=\d+(?:, ip=[^)]*)?\) |^\((?P<daemon>raylet|autoscaler|gcs_server)\b[^)]*\) "
)
"""Ray's prefix of a line of another process."""
REPEATED = re.compile(r" \[repeated \d+x across cluster\].*$")
LOGGED = re.compile(r"^(DEBUG|INFO|WARNING|ERROR|CRITICAL):\d{4}-\d\d-\d\d [\d:,]+:")
"""verl's format of a log line."""
OWN = "verl-digen: "
WATCHED = re.compile(r"^(step \d+/\d+ \||validation after \d+ steps|resumed from )")
"""Log lines of level INFO that are shown."""
LINK = re.compile(r"\bview\b.*https?://", re.IGNORECASE)
"""Lines of W&B, MLflow and others that name a page."""
ERROR = re.compile(
    r"^([\w.]*(Error|Exception|Interrupt|Killed)(\(\w+\))?(: |:?$)|Fatal Python error|Segmentation fault)"
)
"""The last line of a traceback, or of a process that died without one."""
ENDS = ("verl-digen: this config cannot run", "verl-digen: the run stopped")
INTERRUPTED = (f"{ENDS[1]}: Ctrl-C", f"{ENDS[1]}: SIGTERM", "verl-digen: interrupted before")
"""Left out: `digen train` says it with its own command."""
MILESTONES = {
    "Started a local Ray instance": "Ray has started; verl's trainer starts",
    "Connected to Ray cluster": "Ray is connected; verl's trainer starts",
    "Total training steps": "prompts are read; ranks, replicas and rewards start",
    "actor and ref model engine initialized": "trainer ranks have loaded the model",
    "all initialize finished": "everything has started",
}
"""Text of verl's or Ray's -> what a person is told."""


class Console:
    """The lines of a run's output that a person watches. No I/O; the clock comes in.

    Shown as they are: lines of verl-digen, steps, validations, resumes, warnings, addresses of trackers, last lines of
    tracebacks, and what Ray's own processes say; with the seconds so far: milestones of the start. A text is shown
    once, and from an announced end (`ENDS`) on, every line is: it explains why there is no run.

    Example:
        console = Console()
        console.read("(TaskRunnerV1 pid=7) INFO:2026-11-27 19:55:00,049:step 2/3 | reward 0.584", 70)  # "step 2/3 ..."
        console.read("(WorkerDict pid=8) Before FSDP, memory allocated (GB): 0.57", 71)  # None
    """

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        """The run's folder, once it is announced."""
        self.has_begun = False
        """True from the first step or validation on."""
        self.explains_end = False
        """True once the end of the run is explained."""
        self._seen: set[str] = set()

    def read(self, line: str, now_s: float) -> str | None:
        """Text to show for a line of the output; None: nothing. `now_s`: seconds since the start."""
        text = COLOUR.sub("", line).rstrip()
        found = PROCESS.match(text)
        text = REPEATED.sub("", text[found.end() :] if found else text)
        logged = LOGGED.match(text)
        text, level = (text[logged.end() :], logged[1]) if logged else (text, None)
        if text.startswith(INTERRUPTED):
            return None
        if text.startswith(FOLDER_LINE):
            self.run_dir = Path(text.removeprefix(FOLDER_LINE))
        self.explains_end |= text.startswith(ENDS) and not found
        milestone = next((told for mark, told in MILESTONES.items() if mark in text and level in (None, "INFO")), None)
        if WATCHED.match(text):
            self.has_begun = True
        elif milestone is not None:
            text = f"{now_s:4.0f} s  {milestone}"
        elif level is not None and level not in ("DEBUG", "INFO"):
            text = f"{level.lower()}: {text}"
        elif not (
            (self.explains_end and not found)
            or text.startswith(OWN)
            or (found and found["daemon"])
            or LINK.search(text)
            or ERROR.match(text)
        ):
            return None
        if not text or (text in self._seen and not self.explains_end):
            return None
        self._seen.add(text)
        return text


MAIN = (sys.executable, "-m", "verl.trainer.main_ppo")
KILL_AFTER_S = 60.0
"""Time that a run gets to end at once."""
POLL_S = 0.25
"""Time between two looks at signals while the run says nothing."""
NUM_LAST_LINES = 30
"""Lines of the output that are shown of a run that failed without a word of ours."""
HYDRA_REFUSES = "Set the environment variable HYDRA_FULL_ERROR=1 for a complete stack trace."
"""Last line where Hydra refuses a word, with exit code 1."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Ended:
    """A run that has ended."""

    exit_code: int
    """Code of the process; 128 + the number of the signal that ended it."""
    asked_by: int | None
    """Number of the newest signal that asked it to end."""
    run_dir: Path | None
    """None: it ended before it had one."""
    reason: str
    """Why it failed, in lines; "" if it did not."""

    @property
    def shell_code(self) -> int:
        """Exit code for a shell, in which a signal counts more than how the process ended."""
        return self.exit_code if self.asked_by is None else 128 + self.asked_by


class Launch:
    """One run; `launch` is its only user."""

    def __init__(self, command: Sequence[str], show: Callable[[str], None], signals: list[int]):
        self._show, self._console, self._began_s = show, Console(), time.monotonic()
        self._signals = signals
        """Signals that came and are not handled."""
        self._asked: int | None = None
        """The last signal that was handled."""
        self._is_ending_since_s: float | None = None
        self._log: IO[bytes] | None = None
        self._unlogged: list[bytes] = []
        self._loses_lines = False
        self._last: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )

    def run(self) -> Ended:
        """Follow the run to its end."""
        explained: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(self._child)
            stack.callback(lambda: self._log is not None and self._log.close())
            for raw in self._lines():
                line = raw.decode(errors="replace")
                for part in line.splitlines():  # a progress bar rewrites its line
                    text = self._console.read(part, time.monotonic() - self._began_s)
                    if text is not None:
                        self._show(text)
                        explained += [text] if self._console.explains_end else []
                    self._last.append(part)
                self._write(raw)
            ended = self._child.wait()
        run_dir = self._console.run_dir
        if run_dir is not None:
            with suppress(OSError):
                (run_dir / STOP).unlink()
        code = 128 - ended if ended < 0 else ended
        if self._asked is not None or code == 0:
            return Ended(code, self._asked, run_dir, "")
        if not explained:
            common = "; out of host memory is common" if ended == -signal.SIGKILL else ""
            killed = f" (killed by {signal.Signals(-ended).name}{common})" if ended < 0 else ""
            explained = [f"exit code {code}{killed}; the end of {run_dir and run_dir / LOG}:", *self._last]
            if run_dir is None:  # nothing is in a file
                said = b"".join(self._unlogged).decode(errors="replace").rstrip()
                code = EXIT_REFUSED if said.endswith(HYDRA_REFUSES) else code
                explained = [f"exit code {code}{killed}; it said:", said]
            self._show("\n".join(explained))
        return Ended(code, None, run_dir, "\n".join(explained))

    def _lines(self) -> Iterator[bytes]:
        """Lines of the output, until the process has ended; one that it left behind may hold the pipe."""
        assert self._child.stdout is not None
        pipe, rest = self._child.stdout.fileno(), b""
        while True:
            num_signals = len(self._signals)  # what was said before they came is read before they are handled
            is_ready = bool(select.select([pipe], [], [], POLL_S)[0])
            if not is_ready and self._child.poll() is not None:
                break
            data = os.read(pipe, 1 << 16) if is_ready else None
            if data == b"":
                break
            *whole, rest = (rest + (data or b"")).split(b"\n")
            yield from (line + b"\n" for line in whole)
            self._handle_signals(num_signals)
        if rest:
            yield rest

    def _write(self, raw: bytes) -> None:
        """Add to the log; what came before the folder's name waits for it. A full disk costs lines, not the run."""
        run_dir = self._console.run_dir
        self._unlogged.append(raw)
        if run_dir is None:
            return
        try:
            if self._log is None or self._log.name != str(run_dir / LOG):  # a multirun names a folder for each job
                if self._log is not None:
                    self._log.close()
                self._log = open(run_dir / LOG, "ab", buffering=0)  # noqa: SIM115 - open as long as the run
            self._log.write(b"".join(self._unlogged))
        except OSError as error:
            if not self._loses_lines:
                self._show(f"{run_dir / LOG} lacks lines from here on ({error}); the run goes on")
            self._loses_lines = True
        self._unlogged.clear()

    def _handle_signals(self, count: int) -> None:
        console, now_s = self._console, time.monotonic()
        for _ in range(count):
            is_first, self._asked = self._asked is None, self._signals.pop(0)
            if is_first and self._asked == signal.SIGINT and console.has_begun and console.run_dir is not None:
                try:
                    (console.run_dir / STOP).touch()
                except OSError as error:
                    self._show(f"the run does not end: {error}; Ctrl-C once more ends it at once")
                    continue
                self._show(
                    "Ctrl-C: the run ends after this step, and is saved if trainer.save_freq > 0. Once more: at once"
                )
            elif self._is_ending_since_s is None:
                self._is_ending_since_s = now_s
                self._child.send_signal(signal.SIGTERM if self._asked == signal.SIGTERM else signal.SIGINT)
                self._show("the run ends at once")
            else:
                self._child.kill()
        if self._is_ending_since_s is not None and now_s - self._is_ending_since_s > KILL_AFTER_S:
            self._child.kill()


def launch(words: Sequence[str], *, show: Callable[[str], None]) -> Ended:
    """Run verl's main with these words to its end. `show`: gets each text for a person."""
    signals: list[int] = []
    with handled(signals.append):  # before it starts: a job in a script's background, too, takes Ctrl-C then
        return Launch([*MAIN, *words], show, signals).run()


def summary(run_dir: Path, command: Sequence[str], exit_code: int) -> Iterator[str]:
    """Lines for the end of a run that `command` started: the best validation, where to look, and how to go on."""
    rewards = [(row["val/reward"], row["step"]) for row in read_lines(run_dir / METRICS) if "val/reward" in row]
    if rewards:
        best, step = max(rewards)
        before = f", {rewards[0][0]:.4f} before training" if rewards[0][1] == 0 < step else ""
        yield f"Best validation  reward {best:.4f} after step {step}{before}"
    if (run_dir / REPORT).is_file():
        yield f"Report           {run_dir / REPORT}"
    checkpoint = newest_checkpoint(run_dir)
    if checkpoint is not None:
        yield f"Checkpoint       {checkpoint}"
        yield f"  pictures       {shlex.join(['digen', 'sample', str(run_dir), '--prompt', 'a prompt'])}"
        yield f"  for diffusers  {shlex.join(['digen', 'export', str(run_dir)])}"
    yield f"Console          {run_dir / LOG}"
    if exit_code != 0:
        yield f"{'Begin again' if checkpoint is None else 'Continue':<17}{restart(checkpoint, command)}"


@contextmanager
def handled(handle: Callable[[int], object], signals: Sequence[int] = SIGNALS) -> Iterator[None]:
    """Have `handle` take this process's `signals`, nohup's not; threads other than the main one get none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [one for one in signals if one != signal.SIGHUP or signal.getsignal(one) != signal.SIG_IGN]
    before = {number: signal.signal(number, lambda number, frame: handle(number)) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
