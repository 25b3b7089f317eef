# SPDX-License-Identifier: Apache-2.0
"""The modes that are compared: each is a few overrides, nothing else differs between two runs. Pure.

| mode | pools | fragments train | rows | |
| --- | --- | --- | --- | --- |
| `colocated` | one, in turns | the batch in one call | samples sharded over ranks, one timestep per tile | |
| `colocated+tsp` | one, in turns | the batch in one call | in tiles of samples x timesteps | |
| `barrier` | two | the batch in one call, when it is complete | samples sharded over ranks, one timestep per tile | |
| `gap` | two | as soon as they are ready | samples sharded over ranks, one timestep per tile | |
| `gap+tsp` | two | as soon as they are ready | sharded over ranks, in tiles | |
| `gap+tsp+tag` | two | as soon as they are ready | sharded, in tiles | the trainer assists where a search says so |
| `gap+tsp+tag+tcss` | two | as soon as they are ready | sharded, in tiles | and the next batch begins 1 version early |

All but the last are strict: every sample is generated under the weights that it trains.

*Invariants (tests/bench/test_command.py):* modes differ in the keys of their table alone; repeats are interleaved, so
that a machine that gets slower affects all modes alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_digen.require import require
from verl_digen.tools.simulate.cluster import BARRIER, COLOCATED, COLOCATED_TSP


@dataclass(frozen=True)
class Mode:
    """One way to do the work."""

    name: str
    recipes: tuple[str, ...]
    """Recipes that come after the run's own recipe."""
    overrides: tuple[str, ...]
    techniques: tuple[str, ...]
    """Techniques, by their names in `digen simulate`."""

    @property
    def is_disaggregated(self) -> bool:
        return "disaggregated" in self.recipes


def _tsp(is_on: bool) -> list[str]:
    if is_on:
        return ["digen.tsp.enable=true"]
    return ["digen.tsp.enable=false", "digen.tsp.steps_per_tile=auto"]  # a number the user gives is for tiles


def _separate(*techniques: str) -> Mode:
    switches = [f"digen.gap.enable={str('gap' in techniques).lower()}", *_tsp("tsp" in techniques)]
    switches.append(f"digen.tag.policy={'bts' if 'tag' in techniques else 'off'}")
    switches.append(f"digen.staleness.max_versions={int('tcss' in techniques)}")
    return Mode("+".join(techniques) or BARRIER, ("disaggregated",), tuple(switches), techniques)


MODES = {
    mode.name: mode
    for mode in (
        Mode(COLOCATED, (), tuple(_tsp(False)), ()),
        Mode(COLOCATED_TSP, (), tuple(_tsp(True)), ("tsp",)),
        _separate(),
        _separate("gap"),
        _separate("gap", "tsp"),
        _separate("gap", "tsp", "tag"),
        _separate("gap", "tsp", "tag", "tcss"),
    )
}
"""Name -> mode, in the order of the table."""


def parse_modes(text: str) -> list[Mode]:
    """`barrier,gap` as modes.

    Raises:
        ValueError: an unknown or repeated name, or none.
    """
    names = [name for name in text.split(",") if name]
    require(bool(names), f"--modes must name some of {', '.join(MODES)}", text, "leave it out for all")
    for name in names:
        require(name in MODES, f"--modes must be among {', '.join(MODES)}", name, "choose some of these")
    require(len(set(names)) == len(names), "--modes must name a mode once", text, "use --repeats to run it again")
    return [MODES[name] for name in names]


def interleaved(modes: Sequence[Mode], num_repeats: int) -> list[tuple[int, Mode]]:
    """(repeat, mode) in the order in which they run: A, B, C, A, B, C."""
    return [(repeat, mode) for repeat in range(num_repeats) for mode in modes]
