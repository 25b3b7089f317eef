# SPDX-License-Identifier: Apache-2.0
"""Notes of the pretend device: stalls, float64 operations and attention masks, by file and line."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

PACKAGES = ("verl_digen", "diffusers", "peft", "transformers", "verl", "torch/distributed")
"""Packages whose lines are named, by the innermost frame. A stall of the tests' own is noted under "?"."""


@dataclass
class Record:
    """Counts by (kind or description, "file:line")."""

    stalls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """The host waited for the device. Kinds: "to device", "to host", "value", "index", "synchronize"."""
    float64: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Operations whose result on the device is float64 or complex128."""
    masks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Attention calls with a mask: its shape."""
    num_attentions: int = 0
    """Attention calls, with a mask or without."""

    @property
    def num_stalls(self) -> int:
        """Stalls at lines of `PACKAGES`."""
        return sum(count for (_, place), count in self.stalls.items() if place != "?")

    def lines(self) -> list[str]:
        """Stalls as text, most first."""
        return [f"{count}x {kind} {place}" for (kind, place), count in self.stalls.most_common() if place != "?"]


_records: list[Record] = [Record()]


def current() -> Record:
    """The innermost open record."""
    return _records[-1]


@contextmanager
def recording() -> Iterator[Record]:
    """Context with a record of its own."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def stall(kind: str) -> None:
    """Note that the host waits for the device."""
    current().stalls[kind, place()] += 1


def place() -> str:
    """File and line of the innermost frame in `PACKAGES`; "?" if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        inside = f"{package}/{frame.f_code.co_filename.rpartition(f'/{package}/')[2]}"  # wherever it is installed
        if inside.startswith(tuple(f"{package}/" for package in PACKAGES)):
            return f"{inside}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
