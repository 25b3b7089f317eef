# SPDX-License-Identifier: Apache-2.0
"""A profile for `digen simulate` from the timelines of measured runs: every number is measured, or says why it is not.

- From runs of `gap+tsp`: samples per slot, rows per rank, scores, commit and publication. From runs of `colocated`:
  what a device loses between generating and training.
- Parts that a timeline does not tell apart are in the number they belong to, and the source says so: decoding in
  `step_s`, gathering of weights in `row_s`.

*Invariant (tests/bench/test_measured_profile.py):* with the split it was measured on, the profile gives back the
measured durations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_digen.bench.runs import RunResult
from verl_digen.config import DigenConfig, digen_config
from verl_digen.observe.step_costs import rank_row_s, slot_sample_s
from verl_digen.observe.timeline import Interval, read_timeline
from verl_digen.require import require
from verl_digen.sampling.requests import rows_per_group
from verl_digen.simulate.cluster import COLOCATED_TSP

PIPELINED = "gap+tsp"
"""The mode whose timelines are read."""


def measured_profile(runs: Sequence[RunResult], *, num_warm_up: int, model: str, device: str) -> dict[str, Any]:
    """The profile's JSON.

    Args:
        model: its name, in words.
        device: type, one of `verl_digen.devices`.

    Raises:
        ValueError: a mode that is needed was not run.
    """
    pipelined = [run for run in runs if run.mode.name == PIPELINED]
    colocated = [run for run in runs if not run.mode.is_disaggregated]
    require(
        bool(pipelined) and bool(colocated),
        f"--profile needs the modes {COLOCATED_TSP} and {PIPELINED}, from which it measures",
        ",".join(sorted({run.mode.name for run in runs})),
        "add them to --modes",
    )
    digen = read_config(pipelined[0].run_dir)
    intervals = [interval for run in pipelined for interval in _measured(run, num_warm_up)]
    work = _Work(*(_of_kind(intervals, kind) for kind in ("generate", "train", "score")))
    group_size = _group_size(pipelined)
    num_trained = -(-rows_per_group(digen, group_size) // group_size)
    numbers = {
        **_counts(pipelined, work, digen, num_trained),
        **_work_seconds(work, digen, num_trained),
        **_step_seconds(pipelined, colocated, num_warm_up),
    }
    num_runs = f"{len(pipelined)} runs of {PIPELINED}, {len(work.generating)} chunks, {len(work.training)} fragments"
    return {
        "model": model,
        "setting": f"measured by digen bench: {num_runs}, {num_warm_up} steps of each left out",
        "device": device,
        "numbers": {name: {"value": value, "source": f"measured: {how}"} for name, (value, how) in numbers.items()},
    }


class _Work(NamedTuple):
    """Intervals of the measured steps."""

    generating: list[Interval]
    training: list[Interval]
    scoring: list[Interval]

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer."""
        return self.training[0].lane.num_devices


def _group_size(pipelined: Sequence[RunResult]) -> int:
    num_samples = _once({round(row["batch/num_samples"]) for run in pipelined for row in run.steps}, "samples")
    return num_samples // _once({round(row["batch/num_groups"]) for run in pipelined for row in run.steps}, "groups")


def _counts(
    pipelined: Sequence[RunResult], work: _Work, digen: DigenConfig, num_trained: int
) -> dict[str, tuple[int, str]]:
    num_prompts = _once({round(row["batch/num_groups"]) for run in pipelined for row in run.steps}, "groups")
    return {
        "num_prompts": (num_prompts, "groups of a step"),
        "group_size": (_group_size(pipelined), "samples of a group"),
        "num_steps": (digen.sampling.num_steps, "denoise steps of a sample"),
        "num_trained_steps": (num_trained, "rows of a sample"),
        "max_chunk_size": (digen.rollout.batch_size, "digen.rollout.max_batch_size of the runs"),
        "rows_per_tile": (1, "row_s is what a row took in tiles of the runs' size, whatever that was"),
        "min_trainer_devices": (work.num_ranks, "the trainer of the runs; fewer were not tried"),
        "min_gathering_devices": (1, "no matter, with a gather_s of 0"),
    }


def _work_seconds(work: _Work, digen: DigenConfig, num_trained: int) -> dict[str, tuple[float, str]]:
    """Seconds of the parts that the timelines hold one by one."""
    return {
        "step_s": (
            slot_sample_s(_calls(work.generating)) / digen.sampling.num_steps,
            "a slot's time for a chunk / its samples / denoise steps; encoding, decoding and transfer included",
        ),
        "decode_s": (0.0, "part of step_s, from which a timeline does not tell it"),
        "row_s": (
            rank_row_s(_calls(work.training), work.num_ranks, num_trained),
            f"time of a fragment / its rows on the fullest of {work.num_ranks} ranks; gathering of weights included",
        ),
        "gather_s": (0.0, "part of row_s, from which a timeline does not tell it"),
        "score_s": (
            median(part.duration_s for part in work.scoring),
            "from a chunk's pixels to its scores in the queue",
        ),
    }


def _calls(intervals: Sequence[Interval]) -> list[tuple[int, float]]:
    return [(part.num_samples, part.duration_s) for part in intervals]


def _step_seconds(
    pipelined: Sequence[RunResult], colocated: Sequence[RunResult], num_warm_up: int
) -> dict[str, tuple[float, str]]:
    """Seconds that a step has once."""
    commits = _by_step(pipelined, num_warm_up, ("commit", "publish"))
    measured = [row for run in colocated for row in run.steps[num_warm_up:]]
    return {
        "commit_s": (
            median(sum(part.duration_s for part in of_step) for of_step in commits),
            "optimizer step and publication, as the driver sees them",
        ),
        "switch_s": (
            median(max(0.0, row["perf/overhead_s"] - row["perf/sync_s"]) for row in measured),
            f"{len(colocated)} colocated runs: time in which nothing was done, less publication, which is in commit_s",
        ),
    }


def read_config(run_dir: Path) -> DigenConfig:
    """The `digen:` section a run was composed with, as Hydra wrote it."""
    return digen_config(OmegaConf.load(run_dir / "hydra" / ".hydra" / "config.yaml"))  # type: ignore[arg-type]


def _measured(run: RunResult, num_warm_up: int) -> Iterable[Interval]:
    first = run.steps[num_warm_up]["step"]
    timeline = read_timeline(run.run_dir / "timeline.jsonl")
    return (interval for interval in timeline.intervals if interval.step >= first)


def _by_step(runs: Sequence[RunResult], num_warm_up: int, kinds: tuple[str, ...]) -> list[list[Interval]]:
    """The intervals of these kinds, step by step of each run."""
    steps: dict[tuple[Path, int], list[Interval]] = {}
    for run in runs:
        for interval in _measured(run, num_warm_up):
            if interval.kind in kinds:
                steps.setdefault((run.run_dir, interval.step), []).append(interval)
    return list(steps.values())


def _of_kind(intervals: Sequence[Interval], kind: str) -> list[Interval]:
    found = [interval for interval in intervals if interval.kind == kind and interval.num_samples > 0]
    if not found:
        raise RuntimeError(f"the timelines of {PIPELINED} hold no {kind} interval after the warm-up")
    return found


def _once(values: set[int], noun: str) -> int:
    require(len(values) == 1, f"--profile needs steps of equally many {noun}", sorted(values), "drop and refill none")
    return values.pop()
