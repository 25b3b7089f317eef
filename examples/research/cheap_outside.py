# SPDX-License-Identifier: Apache-2.0
"""Cheap steps outside the window (digen.sampling.outside), side by side: training, pictures, and seconds of generation.

    python examples/research/cheap_outside.py [--modes exact,cache,pass_over,fp8] [--steps 25] [--out DIR]
    python examples/research/cheap_outside.py --timing    # seconds of generation, in turns; on an idle machine
    python examples/research/cheap_outside.py --draw      # the picture, of the runs that are there

The quick start with a window of 3 of 20 steps (recipe flowgrpo_fast), once per mode with the same seed, through verl's
main: 3 to 4 minutes each on 2 CPU cores. Then `outside.png` and `outside.json` in --out. `make quickstart` before, for
the environment. Run it from the repository's folder.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import torch
from one_sample import generate as generate_one

from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.window import WindowConfig, draw_window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.observe.run_files import METRICS, read_lines
from verl_digen.rollout.server import DiffusersServer
from verl_digen.tools.bench import Mode, run_dir_of, run_mode
from verl_digen.tools.checkup.training import read_steps
from verl_digen.types import Geometry, SampleRequest, Sampling

MODES = {
    "exact": Outside(),
    "cache": Outside(cache=0.1),
    "pass_over": Outside(solver_before=0.5, solver_after=0.4),
    "fp8": Outside(fp8=True),
}
NUM_STEPS, SIZE_PX, GROUP_SIZE, NUM_PROMPTS = 20, 64, 12, 8
WINDOW = WindowConfig(kind="consecutive", size=3)
CHECKPOINT = Path("examples/tiny_qwen_image/checkpoint")
PROMPTS = Path("examples/tiny_qwen_image/prompts/val.jsonl")
SHOWN = 8
"""Validation prompts in the picture."""


def mode_of(name: str) -> Mode:
    """Mode of a run: the fields of its `Outside` that are not the defaults."""
    default = asdict(Outside())
    changed = {key: value for key, value in asdict(MODES[name]).items() if value != default[key]}
    overrides = [f"digen.sampling.outside.{key}={json.dumps(value)}" for key, value in changed.items()]
    return Mode(name, ("flowgrpo_fast",), (f"digen.sampling.num_steps={NUM_STEPS}", *overrides))


def train(names: list[str], num_steps: int, seed: int, out: Path) -> None:
    """Make the runs that are missing, one after the other."""
    overrides = (f"digen.seed={seed}", "trainer.test_freq=5", "trainer.val_before_train=true")
    work = {"recipe": "digen_quickstart", "overrides": overrides, "num_steps": num_steps}
    for name in names:
        if not read_steps(run_dir_of(out, mode_of(name), seed)):
            result = run_mode(mode_of(name), seed, out, **work)
            print(f"{name}: {result.wall_s:.0f} s in all", flush=True)


async def measure(names: list[str], rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """Mode -> median seconds in which a replica generates a batch of the run, and the share of steps it skips."""
    digen = DigenConfig(rollout=RolloutConfig(max_batch_size=32, batch_wait_s=0.002))
    config = DiffusionModelConfig(path=str(CHECKPOINT), digen=digen)
    rollout = SimpleNamespace(dtype="float32", tensor_model_parallel_size=1, enforce_eager=True)
    server = DiffusersServer(rollout, config, num_threads=0)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[:NUM_PROMPTS]]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    skipped: dict[str, list[int]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first one warms up
        for name in names:
            sampling = Sampling(Geometry(SIZE_PX, SIZE_PX), NUM_STEPS, 1.0, "cps", noise_level=0.8, outside=MODES[name])
            began_s = clock()
            answers = await asyncio.gather(
                *(
                    generate_one(server, request)
                    for place, text in enumerate(texts)
                    for request in group(f"g{number}_{place}", text, sampling)
                )
            )
            if number > 0:
                seconds[name].append(clock() - began_s)
                skipped[name] += [answer.trajectory.facts.num_skipped_steps for answer in answers]
    return {
        name: {"generate_s": median(seconds[name]), "skipped_step_share": mean(skipped[name]) / NUM_STEPS}
        for name in names
    }


def group(uid: str, text: str, sampling: Sampling) -> list[SampleRequest]:
    """Requests of one group, with its window."""
    window = draw_window(WINDOW, run_seed=0, uid=uid, num_steps=NUM_STEPS, step=0)
    return [
        SampleRequest(uid, index, PromptInputs(text), PromptInputs(" "), window, sampling)
        for index in range(GROUP_SIZE)
    ]


def points(run_dir: Path) -> dict[str, Any]:
    """Rewards, shares and seconds of a run."""
    rows = read_lines(run_dir / METRICS)
    steps = [row for row in rows if "perf/step_s" in row]
    return {
        "train": [round(row["reward/mean"], 4) for row in steps],
        "val": [[int(row["step"]), round(row["val/reward"], 4)] for row in rows if "val/reward" in row],
        "skipped_step_share": round(mean(row.get("rollout/skipped_step_share", 0.0) for row in steps), 4),
        "generate_s": round(median(row["perf/generate_s"] for row in steps), 3),
        "log_prob_gap_max": max(row["rollout/log_prob_gap_max"] for row in steps),
    }


def pictures(run_dir: Path, step: int) -> list[Path]:
    """Validation pictures of a step, by prompt."""
    return sorted(run_dir.glob(f"images/step_{step:06}/*"))[:SHOWN]


def draw(found: Mapping[str, Mapping[str, Any]], out: Path, seed: int) -> None:
    """Validation reward over steps, and the last validation's pictures of each run."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure = plt.figure(figsize=(13, 3.6), layout="constrained")
    left, right = figure.subfigures(1, 2, width_ratios=(1, 1.6))
    axes = left.subplots()
    for name, run in found.items():
        label = f"{name}: {run['skipped_step_share']:.0%} of evaluations skipped"
        axes.plot(*zip(*run["val"], strict=True), marker="o", markersize=3, label=label)
    axes.set(xlabel="training step", ylabel="validation reward")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    cells = right.subplots(len(found), SHOWN, squeeze=False)
    for row, (name, run) in zip(cells, found.items(), strict=True):
        paths = pictures(run_dir_of(out, mode_of(name), seed), run["val"][-1][0])
        for cell, path in zip(row, paths, strict=True):
            cell.imshow(plt.imread(path))
            cell.set(xticks=[], yticks=[])
        row[0].set_ylabel(name)
    figure.savefig(out / "outside.png", dpi=90)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timing", action="store_true", help="measure generation, train nothing")
    parser.add_argument("--draw", action="store_true", help="draw the runs that are there, train nothing")
    parser.add_argument("--rounds", type=int, default=9, help="of --timing")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of --timing")
    parser.add_argument("--cpu_time", action="store_true", help="of --timing: CPU seconds, beside other work")
    parser.add_argument("--out", type=Path, default=Path("outputs/cheap_outside"))
    args = parser.parse_args()
    names = args.modes.split(",")
    if unknown := set(names) - MODES.keys():
        parser.error(f"--modes must be among {', '.join(MODES)}, got {', '.join(sorted(unknown))}")
    if args.timing:
        torch.set_num_threads(args.threads)
        clock = time.process_time if args.cpu_time else time.perf_counter
        for name, row in asyncio.run(measure(names, args.rounds, clock)).items():
            shown = f"{row['generate_s']:.3f} s, {row['skipped_step_share']:.3f} of the evaluations skipped"
            print(f"{name}: {shown}", flush=True)
        return
    if not args.draw:
        train(names, args.steps, args.seed, args.out)
    found = {name: points(run_dir_of(args.out, mode_of(name), args.seed)) for name in names}
    (args.out / "outside.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, args.out, args.seed)


if __name__ == "__main__":
    main()
