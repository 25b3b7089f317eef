# SPDX-License-Identifier: Apache-2.0
"""`RUN_DIR/timeline.jsonl`: every interval of a run, one JSON object per line, continued by a resumed run.

- Every start of the run writes a header, `{"timeline": 1, "num_devices": {"trainer": 8, "generator": 8}}`: the schema's
  version, and the devices of each pool from there on. The first line of the file is one.
- Append only, by the driver only, whole lines in one write. An interrupted write leaves a torn last line: reading
  skips it and says so, `keep_until` removes it.
- A resumed run keeps what happened until the end of the step it resumes after, work for later steps included: those
  seconds were spent, though the work is done again.

*Invariants:* what is appended is read back unchanged and in order; a torn last line costs that line alone; nothing that
started after the end of the kept step survives `keep_until`, and nothing before it is lost.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from verl_digen.observe.run_files import replace_text
from verl_digen.observe.timeline.interval import Interval, from_line, join_parts, to_line
from verl_digen.require import refusing

logger = logging.getLogger(__name__)

NAME = "timeline.jsonl"
SCHEMA_VERSION = 1
"""Increased when a reader of the previous version would misread the file."""


@dataclass(frozen=True)
class Timeline:
    """A run's timeline, as read."""

    intervals: tuple[Interval, ...]
    """Sorted by start; the parts of a cut interval are joined."""
    num_devices: Mapping[int, Mapping[str, int]]
    """Complete step -> pool -> devices."""

    @property
    def steps(self) -> list[int]:
        """Complete steps, ascending."""
        return sorted(self.num_devices)


class TimelineFile:
    """The timeline's file; only the driver writes it. Pools without devices are left out of `num_devices`."""

    def __init__(self, path: Path, num_devices: Mapping[str, int]):
        self._path = path
        self._header = {"timeline": SCHEMA_VERSION, "num_devices": dict(num_devices)}
        self._is_open = False

    def keep_until(self, step: int) -> None:
        """Drop what a run resumed after `step` repeats, and a torn last line; 0 drops all. Comes before `append`."""
        if not self._path.exists():
            return
        records = _read(self._path)
        ends_s = [one.end_s for one in records if isinstance(one, Interval) and (one.kind, one.step) == ("step", step)]
        kept = [
            record if isinstance(record, dict) else to_line(record)
            for record in (records if step > 0 else [])
            if isinstance(record, dict) or record.step <= step or record.start_s < max(ends_s, default=-inf)
        ]
        replace_text(self._path, "".join(map(_dump, kept)))

    def append(self, intervals: Iterable[Interval]) -> None:
        """Append intervals of the driver's clock."""
        lines = [_dump(to_line(interval)) for interval in intervals]
        if not self._is_open:
            lines.insert(0, _dump(self._header))
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(lines))
        self._is_open = True


def read_timeline(path: Path, *, most_bytes: int | None = None) -> Timeline:
    """Read a timeline; of a file longer than `most_bytes` its end, and its first line. ValueError: it is of a later
    schema, or a line other than the last is broken."""
    records = _read(path, most_bytes)
    num_devices: dict[int, Mapping[str, int]] = {}
    current: Mapping[str, int] = {}
    for record in records:
        if isinstance(record, dict):
            current = record["num_devices"]
        elif record.kind == "step":
            num_devices[record.step] = current
    intervals = join_parts(record for record in records if isinstance(record, Interval))
    return Timeline(tuple(intervals), num_devices)


def _lines(path: Path, most_bytes: int | None) -> list[bytes]:
    """Lines of the file; of a longer one than `most_bytes` the first line and the whole ones of its end."""
    with open(path, "rb") as file:
        first = file.readline()
        skipped = 0 if most_bytes is None else path.stat().st_size - most_bytes
        if skipped > file.tell():
            file.seek(skipped)
            file.readline()
        return [first, *file]


def _read(path: Path, most_bytes: int | None = None) -> list[dict[str, Any] | Interval]:
    """Read headers and intervals in the order of the file."""
    *whole, last = _lines(path, most_bytes)
    if last.endswith(b"\n"):  # as a complete line does
        whole.append(last)
    elif last:
        logger.warning("%s: the last line is torn, as when a run is killed while it writes; it is left out", path)
    records: list[dict[str, Any] | Interval] = []
    for number, text in enumerate(whole, start=1):
        rule = f"{path}: line {number} must be a line of a timeline"
        with refusing(rule, text[:60], "delete that line, or restore the file"):
            line = json.loads(text)
            record = line if "timeline" in line else from_line(line)
        if isinstance(record, dict) and record["timeline"] != SCHEMA_VERSION:
            raise ValueError(
                f"{path}: line {number}: the schema must be version {SCHEMA_VERSION}, got {record['timeline']}; "
                "use the verl-digen that wrote the file"
            )
        if number == 1 and isinstance(record, Interval):
            raise ValueError(
                f"{path}: the first line must be a header with `timeline` and `num_devices`, got an interval; "
                "restore the file"
            )
        records.append(record)
    return records


def _dump(line: Mapping[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
