# SPDX-License-Identifier: Apache-2.0
"""The lines of a run's output that a person watches. stdlib only, no I/O; the clock comes in.

| shown | which |
| --- | --- |
| as it is | lines of verl-digen, steps, validations, resumes, warnings, addresses of trackers |
| as it is | last lines of tracebacks, and what Ray's own processes say |
| with the seconds so far | milestones of the start |

A text is shown once, and from an announced end (`ENDS`) on, every line is: it explains why there is no run.

Example:
    console = Console()
    console.read("(TaskRunnerV1 pid=7) INFO:2026-11-27 19:55:00,049:step 2/3 | reward 0.584", 70)  # "step 2/3 ..."
    console.read("(WorkerDict pid=8) Before FSDP, memory allocated (GB): 0.57", 71)  # None
"""

from __future__ import annotations

import re
from pathlib import Path

from verl_digen.observe.run_files import FOLDER_LINE

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
INTERRUPTED = ("verl-digen: the run stopped: Ctrl-C", "verl-digen: interrupted before")
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
    def __init__(self) -> None:
        self.run_dir: Path | None = None
        """The run's folder, once it is announced."""
        self.has_begun = False
        """True from the first step or validation on."""
        self.explains_end = False
        """True once the end of the run is explained."""
        self._seen: set[str] = set()

    def read(self, line: str, now_s: float) -> str | None:
        """Text to show for a line of the output; None: nothing.

        Args:
            now_s: seconds since the start.
        """
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
