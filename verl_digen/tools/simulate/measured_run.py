# SPDX-License-Identifier: Apache-2.0
"""A profile of a run on separate pools, from what it left in its folder: `start.json` and `timeline.jsonl`.

Medians over the chunks, fragments and calls of its newest steps, without the first ones of the run. What a timeline
does not say is assumed:

| not in a timeline | assumed |
| --- | --- |
| gathering of weights, where the trainer never assists | part of a row's time |
| whether an assist gathered them once, or at every step | at every step, with its time spread over them |
| switching of a colocated run | no time |

Invariant (tests/simulate/test_measured_run.py): the profile gives back the durations that a timeline holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from verl_digen.config import digen_config
from verl_digen.config.pool_sizes import num_generator_devices, num_replica_devices, num_trainer_devices
from verl_digen.hardware.devices import PEAK_TFLOPS
from verl_digen.observe.run_files import START, json_in
from verl_digen.observe.timeline.file import NAME as TIMELINE
from verl_digen.observe.timeline.file import read_timeline
from verl_digen.observe.timeline.interval import Interval, join_parts
from verl_digen.require import require, require_one_of
from verl_digen.sampling.requests import rows_per_group
from verl_digen.tools.simulate.profile import NEVER, Numbers, Profile

WARM_UP_STEPS = 2
MAX_STEPS = 20
"""Maximum number of steps that are read."""
ONE_TILE = 10**9
"""Rows of a tile: the cost of tiles is in the measured time of a row."""


@dataclass(frozen=True)
class StepParts:
    """Work of one step: (samples, seconds) of each call."""

    step_s: float
    """The step's own extent, without checkpoints."""
    commit_s: float
    """Optimizer step and publication together."""
    chunks: list[tuple[int, float]]
    assists: list[tuple[int, float]]
    fragments: list[tuple[int, float]]
    scores_s: list[float]


def run_profile(run_dir: Path, device: str) -> tuple[Profile, int]:
    """The profile of a run on devices of type `device`, and their number. ValueError: it was no run on separate pools,
    had an environment, or did too few steps."""
    require_one_of("--device", device, PEAK_TFLOPS)
    for name in (START, TIMELINE):
        require((run_dir / name).is_file(), f"--run must be a run's folder, with a {name}", str(run_dir), "name it")
    config: Any = OmegaConf.create(json_in(run_dir / START, "config")["config"])
    num_ranks, num_generators = num_trainer_devices(config), num_generator_devices(config)
    timeline, devices = read_timeline(run_dir / TIMELINE), {"trainer": num_ranks, "generator": num_generators}
    # a run may be resumed on other devices
    alike = [step for step in timeline.steps if devices.items() <= timeline.num_devices[step].items()]
    newest = (step_parts(timeline.intervals, step) for step in alike[WARM_UP_STEPS:][-MAX_STEPS:])
    steps = [parts for parts in newest if parts is not None]
    require(
        num_generators > 0 and not digen_config(config).environment.is_on and len(steps) > 0,
        f"--run must have separate pools, no environment, and more than {WARM_UP_STEPS} steps",
        str(run_dir),
        "digen plan proposes a split before a run",
    )
    setting = (
        f"measured with {num_ranks} + {num_generators} devices, {median(step.step_s for step in steps):.3g} s a step "
        f"(median of {len(steps)})"
    )
    return Profile("run", run_dir.name, setting, device, _numbers(config, steps)), num_ranks + num_generators


def _numbers(config: Any, steps: Sequence[StepParts]) -> Numbers:
    digen, num_ranks, group_size = digen_config(config), num_trainer_devices(config), config.actor_rollout_ref.rollout.n
    num_steps, num_rows = digen.num_generation_steps, -(-rows_per_group(digen, group_size) // group_size)
    # a replica of k devices counts as k slots of one device each, with together its speed
    on_slot_s = median(seconds / number for step in steps for number, seconds in step.chunks)
    step_s = on_slot_s * num_replica_devices(config) / digen.slots_per_replica / num_steps
    # the fullest rank has a fragment's rows / ranks, rounded up
    fragments = ((-(-number * num_rows // num_ranks), seconds) for step in steps for number, seconds in step.fragments)
    return Numbers(
        num_prompts=config.data.train_batch_size,
        group_size=group_size,
        num_steps=num_steps,
        num_trained_steps=num_rows,
        max_chunk_size=digen.rollout.batch_size,
        rows_per_tile=ONE_TILE,
        min_trainer_devices=1,
        min_gathering_devices=NEVER,
        step_s=step_s,
        decode_s=0.0,
        row_s=median(seconds / on_rank for on_rank, seconds in fragments),
        gather_s=_gather_s([part for step in steps for part in step.assists], num_ranks, num_steps, step_s),
        score_s=median([seconds for step in steps for seconds in step.scores_s] or [0.0]),
        commit_s=median(step.commit_s for step in steps),
        switch_s=0.0,
    )


def _gather_s(assists: Sequence[tuple[int, float]], num_ranks: int, num_steps: int, step_s: float) -> float:
    """Seconds of gathering the weights, where it is what an assist waits for; 0.0 if it is not, or nothing assisted."""
    if not assists or num_ranks == 1:
        return 0.0
    excess = [seconds / num_steps - -(-number // num_ranks) * step_s for number, seconds in assists]
    if median(excess) <= 0:
        return 0.0
    return median(seconds / num_steps for _, seconds in assists) * num_ranks / (num_ranks - 1)


def step_parts(intervals: Iterable[Interval], step: int) -> StepParts | None:
    """Work that served `step`, from its intervals and the step before's, in which its first chunks may lie; None
    if it has no extent, chunk or fragment."""
    own = [interval for interval in join_parts(intervals) if interval.step == step]
    seconds = {kind: sum(part.duration_s for part in own if part.kind == kind) for kind in ("step", "save")}
    # replicas take weights on their own lanes, while others work: only the trainer's part holds up the step
    ends = [part for part in own if part.kind in ("commit", "publish") and part.lane.pool == "trainer"]
    parts = StepParts(
        seconds["step"] - seconds["save"],
        sum(part.duration_s for part in ends),
        chunks=_calls(own, "generate"),
        assists=_calls(own, "assist"),
        fragments=_calls(own, "train"),
        # from a chunk's pixels to its scores; a reward's own calls have lanes of their own, from 1 on
        scores_s=[part.duration_s for part in own if part.kind == "score" and part.lane.index == 0],
    )
    return parts if parts.step_s > 0 and parts.chunks and parts.fragments else None


def _calls(intervals: Iterable[Interval], kind: str) -> list[tuple[int, float]]:
    return [(part.num_samples, part.duration_s) for part in intervals if part.kind == kind and part.num_samples > 0]
