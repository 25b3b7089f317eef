# SPDX-License-Identifier: Apache-2.0
"""Show where every device-second of a step went: a trace and a table. `digen report` draws steps on its page.

Writes timeline_step_N.trace.json, for chrome://tracing or https://ui.perfetto.dev, under RUN_DIR/timeline or the folder
given by --out, and prints, per pool, how busy it was and what its idle time waited for.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl_digen.observe.timeline import file
from verl_digen.observe.timeline.analysis import Usage, around_step, pool_usage, step_metrics, step_window
from verl_digen.observe.timeline.file import Timeline, read_timeline
from verl_digen.observe.timeline.interval import Interval
from verl_digen.observe.timeline.trace import to_trace

NAME = "timeline"

ALL, LAST = "all", "last"
NUM_CAUSES = 3
"""Number of causes of idle time in the table."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run's trainer.default_local_dir")
    parser.add_argument("--step", metavar="N", default=LAST, help=f"a step, `{ALL}`, or `{LAST}` (the default)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="where to write; RUN_DIR/timeline by default")


def run(args: Namespace) -> int:
    """Write the trace of each step, and print its table."""
    timeline = _open(args.run_dir)
    out = args.run_dir / "timeline" if args.out is None else args.out
    for step in _choose(timeline, args.step, args.run_dir):
        intervals = around_step(timeline.intervals, step)
        out.mkdir(parents=True, exist_ok=True)
        trace = out / f"timeline_step_{step}.trace.json"
        trace.write_text(json.dumps(to_trace(intervals, step_window(intervals, step))), encoding="utf-8")
        print(*to_table(intervals, step, timeline.num_devices[step]), f"  {trace}", sep="\n")
    return 0


def to_table(intervals: Sequence[Interval], step: int, num_devices: Mapping[str, int]) -> list[str]:
    """Format a step in a few lines."""
    usages = pool_usage(intervals, step, num_devices)
    metrics = step_metrics(intervals, step, num_devices)
    start_s, end_s = step_window(intervals, step)
    lines = [
        f"step {step}: {end_s - start_s:.3f} s, {metrics['perf/images_per_s']:.2f} images/s "
        f"({metrics['perf/images_per_s_per_device']:.3f} per device), trainer and generator at once for "
        f"{metrics['perf/overlap_s']:.3f} s",
        f"  {'pool':<11}{'devices':>7}{'busy':>8}{'bubble':>8}  waited for",
    ]
    for pool, usage in usages.items():
        lines.append(
            f"  {pool:<11}{usage.num_devices:>7}{usage.busy_fraction:>8.1%}{usage.bubble_fraction:>8.1%}  "
            f"{_causes(usage)}"
        )
    if "perf/first_group_fraction" in metrics:
        lines.append(f"  first group complete after {metrics['perf/first_group_fraction']:.1%} of the generation time")
    return lines


def _causes(usage: Usage) -> str:
    shown, rest = usage.causes[:NUM_CAUSES], usage.causes[NUM_CAUSES:]
    parts = [f"{reason} {share:.1%}" for reason, share in shown]
    if rest:
        parts.append(f"{len(rest)} more {sum(share for _, share in rest):.1%}")
    return ", ".join(parts) or "-"


def _open(run_dir: Path) -> Timeline:
    path = run_dir / file.NAME
    if not path.is_file():
        raise ValueError(
            f"RUN_DIR must be the folder of a run, its trainer.default_local_dir, with a {file.NAME}, which a run "
            f"writes from its first step on, got {str(run_dir)!r}; the metrics.jsonl of an older run has perf/* of "
            "every step"
        )
    return read_timeline(path)


def _choose(timeline: Timeline, asked: str, run_dir: Path) -> list[int]:
    steps = timeline.steps
    if not steps:
        raise ValueError(f"{str(run_dir / file.NAME)!r} holds no complete step yet; try again when one is done")
    if asked == ALL:
        return steps
    if asked == LAST:
        return steps[-1:]
    if not asked.isdigit() or int(asked) not in timeline.num_devices:
        raise ValueError(f"--step must be {ALL}, {LAST} or a complete step ({steps[0]} to {steps[-1]}), got {asked}")
    return [int(asked)]
