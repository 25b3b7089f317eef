# SPDX-License-Identifier: Apache-2.0
"""Runs of verl's own main entry: real Ray, TransferQueue, FSDP2 on gloo."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import psutil
import pytest
import torch
from filelock import FileLock

from tests.local_ray import NUM_STARTS, ray_starts
from tests.reward.judges.chat_server import ChatServer, likely, pictures_in
from tests.weight_change import SGD, assert_same_change
from verl_digen.engine.saved_state import SavedState
from verl_digen.models import load_model
from verl_digen.observe.timeline.file import read_timeline

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "examples" / "tiny_qwen_image" / "checkpoint"
PROMPTS = ROOT / "examples" / "tiny_qwen_image" / "prompts"
SHAPES = ROOT / "examples" / "drawn_world" / "shapes_reward.py:compute_score"

SMALL = (
    f"actor_rollout_ref.model.path={CHECKPOINT}",
    f"data.train_files={PROMPTS / 'train.jsonl'}",
    f"data.val_files={PROMPTS / 'val.jsonl'}",
    "data.train_batch_size=4",
    "data.val_max_samples=4",
    "actor_rollout_ref.rollout.n=4",
    f"digen.reward.recipe_functions={{shapes: {{weight: 1.0, reward: {SHAPES}}}}}",
    "digen.sampling.height_px=64",
    "digen.sampling.width_px=64",
    "digen.sampling.num_steps=6",
    "digen.sampling.val_num_steps=6",
    "digen.num_logged_images=4",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.save_freq=-1",
    "trainer.max_actor_ckpt_to_keep=null",
    "trainer.logger=[]",
)

AVERAGED = ("digen.ema.enable=true", "digen.ema.every_steps=2")
"""Overrides for an average of the weights, which changes nothing in the training."""

RAY_IS_LATE = "The current node timed out during startup"
"""Ray's message, before anything of a run has begun."""
IS_UP, START_S = "Training Progress:", 180.0
"""verl's line once all processes of a run are there, and how long other runs wait for it before they start Ray."""

SEPARATE = "[digen_flowgrpo,disaggregated]"
"""Recipe for separate pools."""


@dataclass(frozen=True)
class Run:
    """A finished run."""

    exit_code: int
    output: str
    run_dir: Path

    @property
    def metrics(self) -> list[dict[str, float]]:
        """One entry per step."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    @property
    def last_line(self) -> str:
        """Last line of the output, which names the cause if the run failed; "" if it said nothing."""
        return next(reversed(self.output.strip().splitlines()), "")


def start_main(
    run_dir: Path, *overrides: str, recipe: str = "digen_flowgrpo", main: Sequence[Path | str] | None = None
) -> subprocess.Popen[bytes]:
    """`main recipe=... overrides`, a small run unless overrides say otherwise; without `main` it is verl's."""
    main = main or (sys.executable, "-m", "verl.trainer.main_ppo")
    command = [*main, f"recipe={recipe}", *SMALL]
    command += [f"trainer.default_local_dir={run_dir}", f"hydra.run.dir={run_dir}/hydra", *overrides]
    lock = ray_starts()
    lock.acquire()
    # not to a pipe: it is not read while a test waits for something else, and a run blocks on a full pipe
    with open(_log_of(run_dir), "w") as log:
        process = subprocess.Popen(
            command,
            cwd=run_dir.parent,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    Thread(target=_release, args=(lock, process, _log_of(run_dir)), daemon=True).start()
    return process


def _release(lock: FileLock, process: subprocess.Popen[bytes], log: Path) -> None:
    """Let other runs start once this one's processes, which start with 10 s of a core each, are there, or it ended."""
    until_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < until_s and IS_UP not in log.read_text(errors="replace"):
        time.sleep(0.2)
    lock.release()


def finish_main(process: subprocess.Popen[bytes], run_dir: Path, timeout_s: float = 1800) -> Run:
    """Wait for a run to end."""
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_all(process)
        raise AssertionError(f"the run goes on after {timeout_s} s: {_log_of(run_dir).read_text()[-5000:]}") from None
    return Run(process.returncode, _log_of(run_dir).read_text(), run_dir)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End a run at once."""
    for child in (*processes_of(process), process):
        with suppress(psutil.NoSuchProcess):  # it ended meanwhile
            child.kill()


def _log_of(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.log")


def run_main(
    run_dir: Path,
    *overrides: str,
    recipe: str = "digen_flowgrpo",
    timeout_s: float = 1800,
    main: Sequence[Path | str] | None = None,
) -> Run:
    """`start_main` and `finish_main`; again where Ray, which gives its processes 30 s, did not start on busy cores."""
    for _ in range(NUM_STARTS):
        run = finish_main(start_main(run_dir, *overrides, recipe=recipe, main=main), run_dir, timeout_s)
        if RAY_IS_LATE not in run.output:
            break
    return run


def processes_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Processes of a run that goes on."""
    return psutil.Process(process.pid).children(recursive=True)


def trained_weights(run_dir: Path, step: int, policy: str = "current") -> dict[str, torch.Tensor]:
    """A policy's tensors in a checkpoint by name."""
    saved = SavedState(run_dir / f"global_step_{step}" / "actor")
    assert policy in saved.policies
    return dict(saved.tensors(policy, saved.shapes))


def assert_same_weights(one: Run, other: Run, step: int) -> None:
    """Assert that `other` changed the weights as `one` did, and not as `one` did with one update less, or none."""
    start = load_model(CHECKPOINT).load_transformer(torch.float32).state_dict()
    unequal = {"no training": start, "one update less": trained_weights(one.run_dir, step - 1)}
    expected, got = (trained_weights(run.run_dir, step) for run in (one, other))
    assert_same_change(start, expected, got, unequal=unequal)


def assert_same_gradients(one: Run, other: Run) -> None:
    """Assert equal norms and equal fixed projections of every step's gradient; a projection knows its direction."""
    for ours, theirs in zip(steps_of(other), steps_of(one), strict=True):
        norm = theirs["actor/grad_norm"]
        assert norm > 0 and ours["actor/grad_norm"] == pytest.approx(norm, rel=1e-3)
        assert ours["actor/grad_projection"] == pytest.approx(theirs["actor/grad_projection"], abs=1e-3 * norm)
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-4)


def assert_succeeded(run: Run) -> None:
    # the cause first, in case the report is cut
    assert run.exit_code == 0, f"{run.last_line}\n{run.output[-8000:]}"


def steps_of(run: Run) -> list[dict[str, float]]:
    """The metrics of its steps."""
    return [row for row in run.metrics if "perf/step_s" in row]


def kill_one(process: subprocess.Popen[bytes], actor: str, by: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to one process of the Ray actor class `actor` that the run started."""
    titles = {child: _title(child) for child in processes_of(process)}
    actors = [child for child, title in titles.items() if title == actor]
    assert actors, f"the run has no process of {actor}, but of {sorted({*titles.values()})}"
    actors[0].send_signal(by)


def wait_for(process: subprocess.Popen[bytes], run_dir: Path, is_there: Callable[[], bool]) -> None:
    """Wait until `is_there`, or until the run ends.

    Raises:
        AssertionError: 5 minutes passed. The run is killed.
    """
    deadline = time.monotonic() + 300
    while process.poll() is None and not is_there():
        if time.monotonic() > deadline:
            kill_all(process)
            raise AssertionError(f"what was waited for did not come: {_log_of(run_dir).read_text()[-5000:]}")
        time.sleep(0.05)


def _title(child: psutil.Process) -> str:
    """Ray's workers carry the name of their actor class in their title, ray::[NAME:]CLASS[.METHOD]; "" once ended."""
    try:
        title = " ".join(child.cmdline()).removeprefix("ray::")
    except psutil.NoSuchProcess:
        return ""
    return title.split(".")[0].split(":")[-1].strip()


def assert_every_sample_trained_once(run: Run) -> None:
    """Assert that each step trained 4 groups, and each sample once."""
    num_samples = 16
    for row in steps_of(run):
        assert row["batch/num_samples"] == num_samples
    timeline = read_timeline(run.run_dir / "timeline.jsonl")
    for step in timeline.steps:
        trained = [interval for interval in timeline.intervals if (interval.step, interval.kind) == (step, "train")]
        groups = [uid for interval in trained for uid in interval.group_ids]
        assert len(groups) == len(set(groups)) == 4
        assert sum(interval.num_samples for interval in trained) == num_samples


@pytest.fixture(scope="session")
def two_steps(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of 2 steps with checkpoints, an average and validations, shared by read-only tests."""
    run_dir = tmp_path_factory.mktemp("e2e") / "two"
    return run_main(
        run_dir,
        *SGD,
        "trainer.total_training_steps=2",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
        "trainer.val_before_train=true",
        "trainer.logger=[tensorboard]",
        "digen.reward.recipe_functions.gold={weight: 0, gold: true, reward: jpeg_compressibility}",
        "digen.logged_groups_every=2",
        *AVERAGED,
        main=(Path(sys.executable).with_name("digen"), "train"),
    )


def judged_by(server: ChatServer) -> str:
    """Override for a judge on a server, which changes nothing in the training."""
    return f"digen.reward.recipe_functions.yes_no={{weight: 0.0, url: '{server.url}', max_batch_size: 16}}"


@pytest.fixture(scope="session")
def judge() -> Iterator[ChatServer]:
    """A server of the chat protocol: the redder a picture is, the likelier it says yes."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        yes = 0.1 + 0.8 * float(pictures_in(request)[0][..., 0].mean()) / 255
        return likely(Yes=yes, No=0.9 - yes)

    with ChatServer(answer) as server:
        yield server


@pytest.fixture(scope="session")
def separate(two_steps: Run, tmp_path_factory: pytest.TempPathFactory, judge: ChatServer) -> Run:
    """`two_steps` as if it had been stopped after its first step, continued on separate pools; a judge looks on."""
    assert_succeeded(two_steps)
    run_dir = tmp_path_factory.mktemp("e2e") / "separate"
    shutil.copytree(two_steps.run_dir, run_dir)
    shutil.rmtree(run_dir / "global_step_2")
    (run_dir / "latest_checkpointed_iteration.txt").write_text("1")
    return run_main(
        run_dir,
        *SGD,
        *AVERAGED,
        "trainer.total_training_steps=2",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        "trainer.test_freq=2",
        "digen.reward.recipe_functions.shapes.num_workers=2",  # a pool of its own
        "digen.reward.recipe_functions.shapes.max_batch_size=4",
        "digen.gap.slots_per_replica=1",  # with 2, these small pictures are all drawn before the first is scored
        judged_by(judge),
        recipe=SEPARATE,
    )
