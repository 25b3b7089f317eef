# SPDX-License-Identifier: Apache-2.0
"""Result of a check, and its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class CheckFailed(Exception):
    """A check found the machine wanting.

    Args:
        cause: what was found. remedy: what to do; None gives the check's own.
    """

    def __init__(self, cause: str, remedy: str | None = None):
        super().__init__(cause, remedy)
        self.cause, self.remedy = cause, remedy


@dataclass(frozen=True)
class Outcome:
    """Result of one check."""

    name: str
    passed: bool
    figure: str
    """Measurements as text; "" if the check failed before."""
    seconds: float
    cause: str = ""
    """Why it failed; "" if it passed."""
    remedy: str = ""
    """Remedy; "" if it passed."""
    measured: Sequence[Mapping[str, float | str]] = ()
    """Measurements that the check noted, see `Setting.note`."""

    def __str__(self) -> str:
        """One line, one for each measurement, and for a failed check two more."""
        lines = [f"{'pass' if self.passed else 'FAIL'}  {self.name:<10} {self.seconds:6.1f} s  {self.figure}".rstrip()]
        for figures in self.measured:
            values = ", ".join(f"{name} {_shown(value)}" for name, value in figures.items() if name != "what")
            lines.append(f"      {figures['what']}: {values}")
        if not self.passed:
            lines += [f"      cause  {self.cause}", f"      remedy {self.remedy}"]
        return "\n".join(lines)


def _shown(value: float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def to_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown table of all outcomes, for bug reports."""
    rows = [
        (
            one.name,
            "pass" if one.passed else "FAIL",
            f"{one.seconds:.1f}",
            one.figure if one.passed else one.cause.partition("\n")[0],
        )
        for one in outcomes
    ]
    lines = [("check", "result", "seconds", "figure or cause"), ("---",) * 4, *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
