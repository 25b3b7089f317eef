# SPDX-License-Identifier: Apache-2.0
"""A run's own folder as a profile, and the question which split would be faster for it."""

import json

import pytest
from omegaconf import OmegaConf

from tests.observe.timeline_runs import simulated_run
from verl_digen import cli
from verl_digen.config import digen_schema
from verl_digen.observe.timeline.file import TimelineFile
from verl_digen.observe.timeline.interval import Interval, Lane
from verl_digen.tools.simulate.cluster import assist_s, sample_s, train_s
from verl_digen.tools.simulate.measured_run import WARM_UP_STEPS, run_profile, step_parts

TRAINER, SLOT, DRIVER = Lane("trainer", 0, "h", 4), Lane("generator", 0, "h", 1), Lane("driver", 0, "h", 0)


def digen_simulate(*arguments):
    return cli.main(["simulate", *arguments])


def step_intervals(step, slower=1.0, assists=False):
    """Two groups of two: 4 s for a chunk, 2 s for a fragment, 0.3 s for scores, 0.5 s for commit and publication."""
    begin, work = 20.0 * step, {"group_ids": (f"p{step}",), "num_samples": 2}
    found = [
        Interval("generate", SLOT, step, begin, begin + 4 * slower, chunk_id=step, **work),
        Interval("score", Lane("reward", 0, "h", 0), step, begin + 4, begin + 4.3, **work),
        Interval("train", TRAINER, step, begin + 5, begin + 7 * slower, fragment_id=step, **work),
        Interval("commit", TRAINER, step, begin + 8, begin + 8.2),
        Interval("publish", TRAINER, step, begin + 8.2, begin + 8.5),
        Interval("step", DRIVER, step, begin, begin + 9),
    ]
    if assists:  # two samples on four ranks
        found.append(Interval("assist", TRAINER, step, begin, begin + 5, chunk_id=-step, **work))
    return found


def run_dir(tmp_path, *, num_generators=3, num_steps=5, **of_steps):
    config = OmegaConf.create({"digen": digen_schema()})
    config.digen.sampling.num_steps = 10
    config.digen.gap.slots_per_replica = 1
    config.trainer = {"nnodes": 1, "n_gpus_per_node": 4}
    config.data = {"train_batch_size": 2}
    parallel = dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"), 1)
    rollout = {"n": 2, "nnodes": 1, "n_gpus_per_node": num_generators, **parallel}
    config.actor_rollout_ref = {"rollout": rollout}
    (tmp_path / "start.json").write_text(json.dumps({"config": OmegaConf.to_container(config)}))
    file = TimelineFile(tmp_path / "timeline.jsonl", {"trainer": 4, "generator": num_generators})
    for step in range(1, num_steps + 1):
        file.append(step_intervals(step, slower=3.0 if step <= WARM_UP_STEPS else 1.0, **of_steps))
    return tmp_path


def test_the_profile_gives_back_the_durations_of_the_run(tmp_path):
    profile, num_devices = run_profile(run_dir(tmp_path), "H100")
    numbers = profile.numbers
    assert num_devices == 7 and profile.device == "H100"
    assert "measured with 4 + 3 devices, 9 s a step (median of 3)" in profile.setting
    assert (numbers.num_prompts, numbers.group_size, numbers.num_steps, numbers.num_trained_steps) == (2, 2, 10, 9)
    assert 2 * sample_s(numbers, 1.0) == pytest.approx(4.0)
    assert train_s(numbers, 1, 4, slowdown=1.0, has_tsp=True) == pytest.approx(2.0)
    assert (numbers.score_s, numbers.commit_s) == (pytest.approx(0.3), pytest.approx(0.5))
    assert numbers.gather_s == 0.0


def test_an_assist_that_waits_for_weights_takes_as_long_again(tmp_path):
    numbers = run_profile(run_dir(tmp_path, assists=True), "H100")[0].numbers
    assert assist_s(numbers, 2, 4, 1.0) == pytest.approx(5.0)  # of a sample per rank, which a slot makes in 2 s


def test_the_command_searches_the_splits_of_the_runs_devices(tmp_path, capsys):
    assert digen_simulate("--run", str(run_dir(tmp_path)), "--device", "H100", "--steps", "6") == 0
    out = capsys.readouterr().out
    assert "measured with 4 + 3 devices" in out and "7xH100" in out and "gap+tsp+tag" in out
    assert digen_simulate("--run", str(tmp_path), "--device", "H100", "--devices", "16", "--steps", "6") == 0
    assert "16xH100" in capsys.readouterr().out


def test_what_cannot_be_asked_is_an_error_that_says_why(tmp_path, capsys):
    assert digen_simulate("--run", str(tmp_path), "--device", "H100") == 2
    assert "a run's folder, with a start.json" in capsys.readouterr().err
    assert digen_simulate("--run", str(tmp_path)) == 2
    assert "--run needs --device" in capsys.readouterr().err
    assert digen_simulate("--run", str(run_dir(tmp_path, num_generators=0)), "--device", "H100") == 2
    assert "must have separate pools" in capsys.readouterr().err
    (tmp_path / "timeline.jsonl").unlink()
    file = TimelineFile(tmp_path / "timeline.jsonl", {"trainer": 2, "generator": 5})  # before the run was resumed
    for step in range(1, 6):
        file.append(step_intervals(step))
    assert digen_simulate("--run", str(run_dir(tmp_path, num_steps=WARM_UP_STEPS)), "--device", "H100") == 2
    assert f"more than {WARM_UP_STEPS} steps" in capsys.readouterr().err


def test_a_step_counts_without_its_checkpoint_and_with_the_chunks_that_were_begun_early():
    saved = [*step_intervals(3), Interval("save", TRAINER, 3, 68.0, 69.0)]
    assert step_parts(saved, 3).step_s == 8.0
    intervals, _ = simulated_run(num_steps=4)
    for step in (2, 3, 4):
        parts = step_parts(intervals, step)
        assert sum(number for number, _ in parts.chunks) == sum(number for number, _ in parts.fragments) == 8 * 24
