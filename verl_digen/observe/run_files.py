# SPDX-License-Identifier: Apache-2.0
"""Names of the files in a run's folder that people and commands read, and the file of warnings. stdlib only.

| file | content |
| --- | --- |
| `start.json` | the newest start: words of the command line, config, notes, versions (`preflight.callback`) |
| `console.log` | everything that the run printed (`digen train`) |
| `stop` | made by a person or by Ctrl-C: the run ends after its step, see `verl_digen.trainer.base` |
| `latest_checkpointed_iteration.txt` | step of the newest complete checkpoint |
| `end.json` | how that start ended: `state`, `reason`; none while it lives and after a kill (`preflight.callback`) |
| `run.lock` | which process holds the folder; locked as long as it lives (`preflight.run_folder`) |
| `metrics.jsonl` | numbers of each step |
| `warnings.jsonl` | warnings of the driver |
| `timeline.jsonl` | intervals of each step (`verl_digen.observe.timeline`) |
| `images/step_000010/val-00003.png` | a validation sample; of a video a GIF beside it, and a WAV if it has sound |
| `images/step_000010.json`, `.png` | prompts and rewards of that validation's samples; their grid |
| `images/before_after.png` | first and last validation side by side |
| `images/train_000010/p00000072-003.png` | sample 3 of a training group |
| `images/train_000010.json`, `.png` | best and worst of some groups and the rewards of the step; their grid |
| `report.html` | all of it on one page (`verl_digen.report`) |
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

START, END, LOCK, RUN_FILE = "start.json", "end.json", "run.lock", "run.json"
METRICS, WARNINGS, REPORT = "metrics.jsonl", "warnings.jsonl", "report.html"
LOG, STOP = "console.log", "stop"
POINTER = "latest_checkpointed_iteration.txt"
"""The name verl's `find_latest_ckpt_path` reads."""
CHECKPOINT = "global_step_"
"""Prefix of a checkpoint's folder, which is verl's."""
FOLDER_LINE = "verl-digen: the run's folder is "
"""Begin of the line that names the folder, before anything is written there."""
IMAGES = "images"
VALIDATED, TRAINED = "step_", "train_"
"""Prefixes of a step's folder of pictures."""


def step_dir(run_dir: Path, step: int) -> Path:
    """Folder of the pictures of the validation after `step` optimizer steps."""
    return run_dir / IMAGES / f"{VALIDATED}{step:06d}"


def image_path(run_dir: Path, step: int, uid: str) -> Path:
    """PNG of one validation sample."""
    return step_dir(run_dir, step) / f"{uid}.png"


def group_dir(run_dir: Path, step: int) -> Path:
    """Folder of the pictures of a step's training groups."""
    return run_dir / IMAGES / f"{TRAINED}{step:06d}"


def sample_path(run_dir: Path, step: int, uid: str, index: int) -> Path:
    """PNG of one training sample."""
    return group_dir(run_dir, step) / f"{uid}-{index:03d}.png"


def video_path(path: Path) -> Path:
    """The GIF beside the PNG of a sample; there is one if the sample is a video."""
    return path.with_suffix(".gif")


def audio_path(path: Path) -> Path:
    """The WAV file beside the PNG of a sample; there is one if the sample has sound."""
    return path.with_suffix(".wav")


def pictured_steps(run_dir: Path, prefix: str) -> list[int]:
    """Steps with a JSON file of pictures, ascending. `prefix`: `VALIDATED` or `TRAINED`."""
    numbers = (path.stem.removeprefix(prefix) for path in (run_dir / IMAGES).glob(f"{prefix}*.json"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees the old or the new content, also after a crash or on a full disk, and that
    of one of two processes that write at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON objects of `metrics.jsonl` or `warnings.jsonl`, without nulls, in order; [] without a file. A last line that
    has no end is left out: it is being written, or the disk was full. ValueError if another is no JSON object with a
    step."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = []
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if not isinstance(value, dict) or not isinstance(value.get("step"), int | float):
            raise ValueError(
                f"{path}: line {number} must be a JSON object with a step, got {line[:60]!r}; delete that line"
            )
        found.append({name: item for name, item in value.items() if item is not None})
    return found


def json_in(path: Path, *keys: str, remedy: str = "delete it") -> Any:
    """The JSON object with these keys, without any the list, in a file of a run. ValueError: it is damaged."""
    content = path.read_bytes()
    try:
        found = json.loads(content)
    except ValueError:
        found = None
    if not isinstance(found, dict if keys else list) or not all(key in found for key in keys):
        form = f"an object with {', '.join(keys)}" if keys else "a list"
        raise ValueError(f"{path} must be JSON, {form}, got {content[:60]!r}; {remedy}")
    return found


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append a JSON object."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def checkpoint_dir(run_dir: Path, step: int | str) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return run_dir / f"{CHECKPOINT}{step}"


def newest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that a resume takes, as verl finds it; None without one. ValueError if the pointer is damaged, or
    names a checkpoint that is gone where others are left."""
    path = run_dir / POINTER
    if not path.is_file():
        return None
    step = path.read_text().strip()
    if step.isdecimal() and (folder := checkpoint_dir(run_dir, step)).is_dir():
        return folder
    left = [one.parent.name for one in run_dir.glob(f"{CHECKPOINT}*/{RUN_FILE}")]
    if step.isdecimal() and not left:
        return None
    remedy = f"write the number of {' or '.join(sorted(left))} there" if left else "write its number there"
    raise ValueError(f"{path} must hold the step of the newest checkpoint, got {step!r}; {remedy}")


def restart(checkpoint: Path | None, words: Sequence[str]) -> str:
    """The command of these words so that it continues after the checkpoint; without one, as it was typed."""
    others = [word for word in words if not word.lstrip("+").startswith("trainer.resume_")]
    return shlex.join(words if checkpoint is None else [*others, "trainer.resume_mode=auto"])


def keep_until(path: Path, step: int, *, since_s: float = inf) -> None:
    """Drop the lines that a run resumed after `step` repeats, 0: all, except warnings given at `since_s` or later."""
    if path.exists():
        kept = [one for one in read_lines(path) if 0 < step >= one["step"] or one.get("at_s", -inf) >= since_s]
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))


class WarningsFile(logging.Handler):
    """A handler of a logger; see the module."""

    def __init__(self, path: Path):
        super().__init__(logging.WARNING)
        self._path, self._began_s = path, time.time()
        self.step = 0
        """Optimizer steps so far; the owner sets it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Append a line; a failure is printed, as `logging` does for any handler."""
        said = {"level": record.levelname, "text": record.getMessage()}
        try:
            append_line(self._path, {"at_s": record.created, "step": self.step, **said})
        except OSError:
            self.handleError(record)

    def keep_until(self, step: int) -> None:
        """Drop warnings that earlier starts gave after `step`; 0 drops all of theirs."""
        keep_until(self._path, step, since_s=self._began_s)
