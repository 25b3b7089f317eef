# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of the quick start as its batch grows, and over many steps.

    python examples/research/growth.py --factors 1,2,4,8 --steps 8      # a run for each size of the batch
    python examples/research/growth.py --factors 1 --steps 200          # one long run

A factor multiplies the prompts of a step. Memory is the proportional set size (PSS) of the run's processes, which
counts a page shared by n processes as 1/n in each, by kind of process, and what /dev/shm holds: Ray's object store.
It prints a table: the median second of a step, and the memory near the first step, in the middle and at the end.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from statistics import median

import psutil

from verl_digen.observe.run_files import METRICS, read_lines
from verl_digen.tools.checkup.training import quickstart_override

LOOK_S = 2.0
"""Time between two looks at the processes."""
OTHERS = "others"
KINDS = {
    "main_ppo": "driver",
    "ray::TaskRunner": "task runner",
    "ray::WorkerDict": "ranks",
    "Server": "replicas",
    "AgentLoopWorker": "agent loop",
    "SimpleStorage": "TransferQueue",
    "TransferQueueController": "TransferQueue",
    "Reward": "rewards",
}
"""Part of a process's title or command -> kind."""
PROMPTS = 8
"""Prompts of a step of the quick start."""


def memory_gb(run: psutil.Process) -> Counter[str]:
    """GB of each kind of process of a run."""
    found: Counter[str] = Counter()
    for process in [run, *run.children(recursive=True)]:
        with suppress(psutil.Error):
            title = " ".join(process.cmdline()[:3])
            kind = next((kind for part, kind in KINDS.items() if part in title), OTHERS)
            found[kind] += process.memory_full_info().pss / 1e9
    found["/dev/shm"] = psutil.disk_usage("/dev/shm").used / 1e9
    return found


def measure(factor: int, num_steps: int, out: Path) -> None:
    """Run the quick start with a batch of `factor` times its prompts, and print its rows of the table."""
    run_dir = out / f"times_{factor}"
    run_dir.mkdir(parents=True)
    words = [
        *(
            "recipe=digen_quickstart",
            f"trainer.default_local_dir={run_dir}",
            quickstart_override(0, len(os.sched_getaffinity(0))),
        ),
        *(f"trainer.total_training_steps={num_steps}", f"data.train_batch_size={PROMPTS * factor}"),
        *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.logger=[]", "digen.report=false"),
    ]
    seen: dict[int, Counter[str]] = {}
    with open(run_dir / "console.log", "w") as log:
        run = psutil.Popen([sys.executable, "-m", "verl.trainer.main_ppo", *words], stdout=log, stderr=log)
        while run.poll() is None:
            step = max((int(row["step"]) for row in read_lines(run_dir / METRICS)), default=0)
            if 0 < step < num_steps and step not in seen:
                seen[step] = memory_gb(run)
            time.sleep(LOOK_S)
    if run.returncode:
        raise SystemExit(f"growth.py: the run failed, see {run_dir}/console.log")
    seconds = [row["perf/step_s"] for row in read_lines(run_dir / METRICS) if row["step"] > 2]
    steps = sorted(seen)
    for step in dict.fromkeys((steps[0], steps[len(steps) // 2], steps[-1])):
        parts = ", ".join(f"{kind} {gb:.2f}" for kind, gb in sorted(seen[step].items()))
        print(f"| {factor} | {median(seconds):.2f} | {step} | {seen[step].total():.2f} | {parts} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factors", default="1,2,4,8", help="sizes of the batch, in multiples of the quick start's")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=None, help="folder for the runs; a new one in /tmp without it")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="growth_"))
    print("| batch | s/step | after step | GB | of it |\n| --- | --- | --- | --- | --- |", flush=True)
    for factor in map(int, args.factors.split(",")):
        measure(factor, args.steps, out)


if __name__ == "__main__":
    main()
