# SPDX-License-Identifier: Apache-2.0
"""Virtual devices through verl's own main: many of them, and tensors of a video model's size."""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import fmean
from typing import IO

import pytest

from tests.bench.driver_watch import DriverWatch
from tests.fork_server import shared_server
from verl_digen.bench import command
from verl_digen.bench.command import VIRTUAL_OVERRIDES
from verl_digen.observe.timeline import read_timeline

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.e2e, pytest.mark.long]

WAN_LATENT = (16, 21, 60, 104)
"""Wan2.1, 81 frames of 480 x 832 px: 8.4 MB in fp32."""
NUM_STEPS, NUM_SAMPLES, NUM_LATENTS = 50, 8, 3
MIB = 2**20


def test_32_virtual_devices_of_two_types_take_the_simulated_time_and_what_the_live_system_adds(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "executable", str(shared_server().python))
    parser = ArgumentParser()
    command.add_arguments(parser)
    arguments = "--virtual wan2.1-14b --trainer 16xH800 --generator 16xA100 --time-scale 0.02 --modes gap+tsp"
    arguments += f" --steps 3 --warm-up 1 --repeats 1 --out {tmp_path / 'bench'}"
    assert command.run(parser.parse_args(arguments.split())) == 0, capsys.readouterr()
    data = json.loads((tmp_path / "bench" / "bench.json").read_text())
    mode = data["modes"][0]
    # waiting cannot be shorter than the planner's schedule; what Ray and the queue add depends on this machine
    assert mode["step_s"] / mode["prediction"]["step_s"] > 0.98
    assert mode["prediction"]["bound_s"] <= mode["prediction"]["step_s"]
    assert "colocated+tsp, 16xH800 alone" in mode["speedup"], "two types of devices have baselines, too"
    for row in data["runs"][0]["steps"]:
        assert row["rollout/num_replicas"] == 16
        assert row["batch/num_samples"] == 16 * 8
        assert row["actor/num_rows"] == 16 * 8 * 19
        assert row["rollout/version_age_max_versions"] == 0
    timeline = read_timeline(Path(data["runs"][0]["run_dir"]) / "timeline.jsonl")
    assert timeline.num_devices[3] == {"trainer": 16, "generator": 16}
    assert "simulated" in capsys.readouterr().out


MAX_BYTES_PER_SAMPLE = 50_000
"""Maximum TCP traffic of the driver per sample, both ways: orders, tags and all of Ray's own messages. The latents are
25 MB."""


def start_virtual(run_dir: Path, log: IO[str], *overrides: str) -> subprocess.Popen[bytes]:
    main = (sys.executable, "-m", "verl.trainer.main_ppo", "recipe=[digen_flowgrpo,disaggregated,virtual]")
    given = (
        *VIRTUAL_OVERRIDES,
        "digen.virtual.profile=wan2.1-14b",
        *overrides,
        "trainer.logger=[]",
        f"trainer.default_local_dir={run_dir}",
        f"hydra.run.dir={run_dir}/hydra",
    )
    return subprocess.Popen([*main, *given], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def test_a_video_models_tensors_never_pass_through_the_driver(tmp_path):
    run_dir = tmp_path / "memory"
    overrides = (
        "digen.virtual.time_scale=0.001",
        "digen.virtual.trainer_ranks=16",
        f"digen.virtual.latent_shape={list(WAN_LATENT)}".replace(" ", ""),
        "digen.window.kind=consecutive",
        "digen.window.size=2",
        "actor_rollout_ref.rollout.n_gpus_per_node=16",
        "actor_rollout_ref.rollout.n=4",
        "data.train_batch_size=2",
        f"trainer.total_training_steps={NUM_STEPS}",
    )
    with open(log_of(run_dir), "w") as file:
        process = start_virtual(run_dir, file, *overrides)
        watch = DriverWatch(process.pid)
        at_step: list[tuple[int, float, float, int]] = []
        while process.poll() is None:
            watch.look()
            path = run_dir / "metrics.jsonl"
            num_done = len(path.read_text().splitlines()) if path.is_file() else 0
            if watch.resident_mib:
                at_step.append((num_done, watch.resident_mib[-1], watch.shared_mib[-1], watch.num_bytes))
            time.sleep(0.25)
    assert process.returncode == 0, log_of(run_dir).read_text()[-3000:]
    late = [row for row in at_step if row[0] >= 10]
    tensor_bytes = NUM_SAMPLES * NUM_LATENTS * 4
    for size in WAN_LATENT:
        tensor_bytes *= size
    num_steps = late[-1][0] - late[0][0]
    bytes_per_sample = (late[-1][3] - late[0][3]) / num_steps / NUM_SAMPLES
    first = fmean(mib for step, mib, *_ in late if step < 25)
    last = fmean(mib for step, mib, *_ in late if step >= 40)
    opened_mib = late[-1][2] - late[0][2]
    print(
        f"driver: {max(watch.resident_mib):.0f} MiB at most, {first:.0f} MiB in steps 10 to 24, {last:.0f} MiB from "
        f"step 40, {opened_mib:.1f} MiB of Ray's objects opened meanwhile; {bytes_per_sample / 1000:.1f} kB per sample "
        f"over TCP, both ways, of {tensor_bytes / NUM_SAMPLES / MIB:.0f} MiB of latents"
    )
    assert max(watch.resident_mib) < 1536
    assert last - first < 40, "it grows: MiB over 25 steps"
    assert opened_mib < 8, "it read one of the latents, of 8 MiB, in shared memory"
    assert bytes_per_sample < MAX_BYTES_PER_SAMPLE
