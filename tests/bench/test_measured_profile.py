# SPDX-License-Identifier: Apache-2.0
"""A profile from timelines, against the durations that were written into them."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from tests.bench.cases import finished_run
from verl_digen.bench.measured_profile import measured_profile
from verl_digen.bench.runs import RunResult
from verl_digen.config import digen_schema
from verl_digen.observe.timeline import Interval, Lane, TimelineFile
from verl_digen.simulate.costs import sample_s, train_s
from verl_digen.simulate.profile import parse_profile

SLOT, TRAINER, REWARD = (Lane("generator", 0, "h", 1), Lane("trainer", 0, "h", 2), Lane("reward", 0, "h", 0))
COUNTS = {"batch/num_samples": 4.0, "batch/num_groups": 2.0}
COLOCATED = finished_run("colocated", 0, [3.0, 3.0], extra={"perf/sync_s": 0.2, "perf/overhead_s": 0.5})


def pipelined_run(run_dir: Path) -> RunResult:
    """2 steps of 2 groups of 2; 1.8 s per chunk, 0.9 s per fragment, 0.3 s scores, 0.4 s commit and publication."""
    schema = OmegaConf.create({"digen": digen_schema()})
    schema.digen.sampling.num_steps = 10
    (run_dir / "hydra" / ".hydra").mkdir(parents=True)
    OmegaConf.save(schema, run_dir / "hydra" / ".hydra" / "config.yaml")
    file = TimelineFile(run_dir / "timeline.jsonl", {"trainer": 2, "generator": 1})
    for step in (1, 2):
        slower = 5.0 if step == 1 else 1.0  # the warm-up
        begin = 100.0 * step

        def interval(kind, lane, start_s, seconds, step=step, begin=begin, slower=slower, **work):
            start_s = begin + start_s
            return Interval(kind, lane, step, start_s, start_s + seconds * slower, **work)

        intervals = []
        for group in (0, 1):
            at, own = 10.0 * group, {"group_ids": (f"p{group}",), "num_samples": 2}
            intervals += [
                interval("generate", SLOT, at, 1.8, chunk_id=group, **own),
                interval("score", REWARD, at + 1.8, 0.3, **own),
                interval("train", TRAINER, at + 2.1, 0.9, fragment_id=group, **own),
            ]
        intervals += [
            interval("commit", TRAINER, 30.0, 0.1),
            interval("publish", TRAINER, 31.0, 0.3),
            interval("step", Lane("driver", 0, "h", 0), 0.0, 40.0),
        ]
        file.append(intervals)
    return finished_run("gap+tsp", 0, [40.0, 40.0], extra=COUNTS, run_dir=run_dir)


def test_the_profile_gives_back_the_durations_it_was_measured_from(tmp_path):
    data = measured_profile([pipelined_run(tmp_path), COLOCATED], num_warm_up=1, model="tiny", device="H100")
    assert all(entry["source"].startswith("measured: ") for entry in data["numbers"].values())
    profile = parse_profile("mine", json.dumps(data))  # what `digen simulate --profile` reads
    numbers = profile.numbers
    assert (numbers.num_prompts, numbers.group_size, numbers.num_steps, numbers.num_trained_steps) == (2, 2, 10, 9)
    assert 2 * sample_s(numbers, 1.0) == pytest.approx(1.8)
    assert train_s(numbers, 1, 2, slowdown=1.0, has_tsp=True) == pytest.approx(0.9)
    assert (numbers.score_s, numbers.commit_s) == (pytest.approx(0.3), pytest.approx(0.4))
    assert numbers.switch_s == pytest.approx(0.3)
    assert numbers.min_trainer_devices == 2


def test_modes_that_are_missing_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--profile needs the modes colocated\+tsp and gap\+tsp.*got 'gap\+tsp'"):
        measured_profile([pipelined_run(tmp_path)], num_warm_up=1, model="tiny", device="H100")
