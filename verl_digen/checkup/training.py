# SPDX-License-Identifier: Apache-2.0
"""Steps of real runs through verl's main: Ray, TransferQueue, FSDP2, replicas, weight updates.

- The quick start, of random weights as `digen doctor --gpu` runs it, or as a user starts it.
- Stable Diffusion 3.5 medium and Qwen-Image of published size with random weights (`checkpoints`), beside what
  `digen plan` says of the same words.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from verl.plugin.platform import get_platform

from verl_digen.bench.runs import LOG_NAME, NUM_LOG_LINES, STEPS_ALONE, read_steps
from verl_digen.checkup.checkpoints import write_checkpoint
from verl_digen.checkup.checks import CheckFailed, Setting
from verl_digen.checkup.quickstart import quickstart_devices
from verl_digen.models.tiny import build_tiny
from verl_digen.torch_support import torch_facts, torch_has_accelerator_support

NUM_STEPS = 3
COLOURS, SHAPES = ("red", "green", "blue", "white"), ("circle", "square")
CPU_REWARDS = (0.5922, 0.5845, 0.5451)
"""Rewards of the quick start's first steps in fp32 on a CPU; noise is the same on every device."""
REWARD_TOLERANCE = 0.01
"""Difference that other kernels may make: a reward is a mean over 96 pictures, each of which can flip a step."""
FP32 = (
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
    "++actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
)
NOTED = (
    *("perf/step_s", "perf/generate_s", "perf/train_s", "perf/sync_s", "perf/overhead_s", "perf/images_per_s"),
    *("perf/mfu/trainer", "perf/mfu/generator", "rollout/log_prob_gap_max", "actor/grad_norm", "reward/mean"),
    *("actor/num_tiles", "actor/recomputed_share", "actor/num_skipped_updates", "rollout/weight_load_s_max"),
    *("actor/perf/max_memory_allocated_gb", "actor/perf/max_memory_reserved_gb", "actor/perf/cpu_memory_used_gb"),
)
"""Metrics of a step that are noted where they are there."""
REWARD = "digen.reward.functions={jpeg_compressibility: 1.0}"
SMALL = ("digen.sampling.height_px=64", "digen.sampling.width_px=64", "digen.sampling.num_steps=6")
"""Overrides of a run of published size on a CPU."""


def check_training(setting: Setting) -> str:
    """Train the quick start's recipe from random weights.

    Raises:
        CheckFailed: it ended with an error, without its steps, or without a gradient.
    """
    checkpoint, prompts = build_tiny("qwen_image", setting.folder / "checkpoint"), setting.folder / "prompts.jsonl"
    _write_prompts(prompts, [f"a {colour} {shape} on the left" for colour in COLOURS for shape in SHAPES])
    words = (
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        REWARD,
    )
    return conclude(_train(setting, "digen_quickstart", words, NUM_STEPS), quickstart_devices(setting.num_devices))


def check_quickstart(setting: Setting) -> str:
    """Five steps of the quick start's own checkpoint, as a user starts it.

    Raises:
        CheckFailed: as `check_training`.
    """
    require_checkout()
    num_steps = 1 if setting.is_cpu else 5
    return conclude(
        _train(setting, "digen_quickstart", (), num_steps), quickstart_devices(setting.num_devices), num_steps
    )


def check_quickstart_fp32(setting: Setting) -> str:
    """Three steps of it in fp32, with the rewards of a CPU.

    Raises:
        CheckFailed: as `check_training`, or other rewards.
    """
    require_checkout()
    steps = _train(setting, "digen_quickstart", FP32, len(CPU_REWARDS))
    figure = conclude(steps, quickstart_devices(setting.num_devices))
    rewards = [step["reward/mean"] for step in steps]
    if max(abs(here - there) for here, there in zip(rewards, CPU_REWARDS, strict=True)) > REWARD_TOLERANCE:
        raise CheckFailed(f"rewards must be {_numbers(CPU_REWARDS)}, got {_numbers(rewards)}")
    return f"{figure}; rewards {_numbers(rewards)}"


def require_checkout() -> None:
    """Raise `CheckFailed` outside a checkout, where the quick start's files are missing."""
    if not Path("examples/tiny_qwen_image/checkpoint").is_dir():
        raise CheckFailed("the quick start's checkpoint is not in this folder", "start it in the checkout's folder")


@dataclass(frozen=True)
class TrueSizeRun:
    """A run of published size."""

    checkpoint: str
    """Key of `checkpoints.TRUE_SIZES`."""
    recipe: str
    overrides: tuple[str, ...]
    group_size: int
    num_steps: int


TWO_GROUPS = ("data.train_batch_size=2", "digen.rollout.max_batch_size=32")
TRUE_SIZE_RUNS = {
    "sd3": TrueSizeRun("sd3", "digen_sd3", TWO_GROUPS, 16, 2),
    "sd3_fast": TrueSizeRun("sd3", "digen_sd3+flowgrpo_fast", TWO_GROUPS, 16, 2),
    "sd3_nft": TrueSizeRun("sd3", "digen_sd3+nft", TWO_GROUPS, 16, 2),
    "qwen_image": TrueSizeRun("qwen_image", "digen_qwen_image", ("data.train_batch_size=1",), 8, 2),
}


def check_true_size(setting: Setting) -> str:
    """Steps of one run of published size; the check's folder has its name.

    Raises:
        CheckFailed: see `check_training`.
    """
    run = TRUE_SIZE_RUNS[setting.folder.name]
    make = build_tiny if setting.is_cpu else write_checkpoint
    checkpoint = make(run.checkpoint, setting.checkpoints / run.checkpoint)
    prompts = setting.folder / "prompts.jsonl"
    _write_prompts(prompts, [f"{'a red circle beside ' * (number % 5 + 1)}{number} squares" for number in range(16)])
    words = (
        *(f"actor_rollout_ref.model.path={checkpoint}", f"data.train_files={prompts}", f"data.val_files={prompts}"),
        *(REWARD, "digen.report=false"),
        *(f"actor_rollout_ref.rollout.n={2 if setting.is_cpu else run.group_size}", *run.overrides),
        *(SMALL if setting.is_cpu else ()),
    )
    num_steps = 1 if setting.is_cpu else run.num_steps
    with subprocess.Popen(plan_command(setting, run.recipe, words), stdout=subprocess.PIPE, text=True) as planning:
        try:
            steps = _train(setting, run.recipe, words, num_steps)
        finally:
            plan, _ = planning.communicate()
            _note_plan(setting, plan)
    return conclude(steps, quickstart_devices(setting.num_devices), num_steps)


def plan_command(setting: Setting, recipe: str, words: Sequence[str]) -> list[str]:
    """Command line that plans the run on the devices that it takes; where there are none, on an H100."""
    program = "import sys; from verl_digen.cli import main; sys.exit(main())"
    devices = (f"gpus={quickstart_devices(setting.num_devices)}", *(("device=H100",) if setting.is_cpu else ()))
    plan = (sys.executable, "-W", "ignore", "-c", program, "plan", "--json")
    return [*plan, f"recipe={recipe}", *words, *devices]


def _note_plan(setting: Setting, text: str) -> None:
    """Note what `digen plan --json` calculated; what it refuses is in the check's log."""
    if text:
        plan = json.loads(text)
        phases = {f"{name}_gb": plan[name]["total_bytes"] / 1e9 for name in ("training", "generating", "decoding")}
        setting.note(
            "planned (calculated)", **phases, host_gb=plan["host_needed_bytes"] / 1e9, **_seconds_of(plan["time"])
        )


def _seconds_of(time: Mapping[str, float | None]) -> dict[str, float]:
    names = ("generating_s", "training_s", "step_s")
    return {name: seconds for name in names if (seconds := time[name]) is not None}


def conclude(steps: Sequence[Mapping[str, float]], num_devices: int, num_steps: int = NUM_STEPS) -> str:
    """Metrics of the steps -> figure.

    Raises:
        CheckFailed: steps are missing, or have no gradient.
    """
    norms = [step["actor/grad_norm"] for step in steps]
    updates = [step["actor/grad_norm"] for step in steps if step["actor/num_skipped_updates"] == 0]  # fp16 may overflow
    if len(steps) != num_steps or not updates or not all(math.isfinite(norm) and norm > 0 for norm in updates):
        raise CheckFailed(f"{num_steps} steps with a gradient were due, got gradient norms {norms}")
    seconds = ", ".join(f"{step['perf/step_s']:.1f}" for step in steps)
    gap = max(step["rollout/log_prob_gap_max"] for step in steps)
    return f"{num_steps} steps on {num_devices} device(s) in {seconds} s; log-probs differ by {gap:.0e}"


def _train(setting: Setting, recipes: str, words: Sequence[str], num_steps: int) -> tuple[Mapping[str, float], ...]:
    """Run verl's main in a process of its own -> metrics of its steps; its log is `run/console.log` in the folder.

    Raises:
        CheckFailed: it ended with an error.
    """
    run_dir = setting.folder / "run"
    run_dir.mkdir()
    log = run_dir / LOG_NAME
    command = train_command(setting, recipes, words, num_steps, run_dir)
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False)
    steps = read_steps(run_dir)
    for number, step in enumerate(steps, 1):
        setting.note(f"step {number}", **{key: step[key] for key in NOTED if key in step})
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        stopped = [line for line in lines if "verl-digen: " in line or "Error" in line]
        raise CheckFailed(
            f"verl's main ended with exit code {done.returncode}: {(stopped or lines or ['no output'])[-1].strip()}; "
            f"the last {NUM_LOG_LINES} lines of {log}:\n" + "\n".join(lines[-NUM_LOG_LINES:])
        )
    return steps


def train_command(setting: Setting, recipes: str, words: Sequence[str], num_steps: int, run_dir: Path) -> list[str]:
    """Command line of a run."""
    is_forced = get_platform().device_name == "cpu" and torch_has_accelerator_support(torch_facts())
    first, *parts = recipes.split("+")
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"recipe={'+'.join([first, *(['digen_cpu'] if is_forced else []), *parts])}",
        f"trainer.n_gpus_per_node={quickstart_devices(setting.num_devices)}",
        f"trainer.total_training_steps={num_steps}",
        *STEPS_ALONE,
        "++ray_kwargs.ray_init.include_dashboard=false",
        *words,
        f"trainer.default_local_dir={run_dir}",
        f"hydra.run.dir={run_dir}/hydra",
    ]


def _write_prompts(file: Path, texts: Sequence[str]) -> None:
    rows = [
        {"prompt": text, "data_source": "doctor", "reward_model": {"style": "rule", "ground_truth": text}}
        for text in texts
    ]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
