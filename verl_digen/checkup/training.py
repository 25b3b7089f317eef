# SPDX-License-Identifier: Apache-2.0
"""Three steps of the quick start through verl's main: Ray, TransferQueue, FSDP2, replicas, weight updates."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from verl.plugin.platform import get_platform

from verl_digen.bench.runs import LOG_NAME, NUM_LOG_LINES, read_steps
from verl_digen.checkup.outcome import CheckFailed
from verl_digen.checkup.setting import Setting, quickstart_devices
from verl_digen.models.tiny import build_tiny
from verl_digen.reward.scorers.shapes.scene import all_scenes, caption
from verl_digen.torch_support import torch_facts, torch_has_accelerator_support

NUM_STEPS = 3
NUM_PROMPTS = 24


def check_training(setting: Setting) -> str:
    """Run verl's main in a process of its own; its log is `console.log` in the folder.

    Raises:
        CheckFailed: it ended with an error, without its steps, or without a gradient.
    """
    run_dir, log = setting.folder / "run", setting.folder / LOG_NAME
    with open(log, "w", encoding="utf-8") as file:
        done = subprocess.run(
            command(setting, run_dir), cwd=setting.folder, stdout=file, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        stopped = [line for line in lines if "verl-digen: " in line or "Error" in line]
        raise CheckFailed(
            f"verl's main ended with exit code {done.returncode}: {(stopped or lines or ['no output'])[-1].strip()}; "
            f"the last {NUM_LOG_LINES} lines of {log}:\n" + "\n".join(lines[-NUM_LOG_LINES:])
        )
    return conclude(read_steps(run_dir), quickstart_devices(setting.num_devices))


def conclude(steps: Sequence[Mapping[str, float]], num_devices: int) -> str:
    """Metrics of the steps -> figure.

    Raises:
        CheckFailed: see `check_training`.
    """
    norms = [step["actor/grad_norm"] for step in steps]
    if len(steps) != NUM_STEPS or not all(math.isfinite(norm) and norm > 0 for norm in norms):
        raise CheckFailed(f"{NUM_STEPS} steps with a gradient were due, got gradient norms {norms}")
    seconds = ", ".join(f"{step['perf/step_s']:.1f}" for step in steps)
    gap = max(step["rollout/log_prob_gap_max"] for step in steps)
    return f"{NUM_STEPS} steps on {num_devices} device(s) in {seconds} s; log-probs differ by {gap:.0e}"


def command(setting: Setting, run_dir: Path) -> list[str]:
    """Command line of the run; writes its checkpoint and prompts."""
    checkpoint = build_tiny("qwen_image", setting.folder / "checkpoint")
    prompts = setting.folder / "prompts.jsonl"
    rows = [
        {"prompt": text, "data_source": "digen_shapes", "reward_model": {"style": "rule", "ground_truth": text}}
        for text in map(caption, all_scenes()[:NUM_PROMPTS])
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    is_forced = get_platform().device_name == "cpu" and torch_has_accelerator_support(torch_facts())
    return [
        *(sys.executable, "-m", "verl.trainer.main_ppo"),
        f"recipe={'[digen_quickstart,digen_cpu]' if is_forced else 'digen_quickstart'}",
        f"trainer.n_gpus_per_node={quickstart_devices(setting.num_devices)}",
        f"trainer.total_training_steps={NUM_STEPS}",
        *("trainer.test_freq=-1", "trainer.val_before_train=false", "trainer.save_freq=-1"),
        *("trainer.resume_mode=disable", "trainer.logger=[]"),
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        f"trainer.default_local_dir={run_dir}",
        f"hydra.run.dir={run_dir}/hydra",
    ]
