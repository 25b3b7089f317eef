# SPDX-License-Identifier: Apache-2.0
"""Folders of runs to make reports of, with the files that a run leaves."""

import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.observe.timeline_runs import simulated_run
from verl_digen.observe.run_files import METRICS, START, WARNINGS, group_dir, image_path, sample_path, step_dir
from verl_digen.observe.timeline.file import NAME, TimelineFile
from verl_digen.trainer.run_output import append_metrics

HOSTILE = '</script><script>document.title = "taken"</script><!-- & "quoted" \u2028'
"""A prompt that would end the script around it."""
PROMPTS = ("a red circle", HOSTILE, "two blue squares")


def save_noise(path: Path, size: tuple[int, int], seed: int) -> None:
    """Write a picture that compresses as badly as any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


def add_validation(run_dir: Path, step: int, prompts=PROMPTS, size=(16, 16)) -> None:
    """Write pictures and rewards of a validation; the reward of prompt i after step s is i + s / 100."""
    entries = []
    for index, prompt in enumerate(prompts):
        uid = f"val-{index:05d}"
        save_noise(image_path(run_dir, step, uid), size, seed=step + index)
        entries.append({"uid": uid, "prompt": prompt, "reward": index + step / 100})
    step_dir(run_dir, step).with_suffix(".json").write_text(json.dumps(entries))


def add_groups(run_dir: Path, step: int, rewards=(0.0, 0.25, 1.0)) -> None:
    """Write the best and the worst of a group of 3, and the distribution of the rewards of a step."""
    shown = []
    for word, index, reward in (("best", 2, 1.0), ("worst", 0, 0.0)):
        path = sample_path(run_dir, step, f"p{step:08d}", index)
        save_noise(path, (16, 16), seed=step)
        shown.append({"file": path.name, "prompt": f"{word} of 3: {HOSTILE}", "reward": reward})
    found = {"shown": shown, "values": {"distribution/reward": list(rewards), "distribution/shapes": list(rewards)}}
    group_dir(run_dir, step).with_suffix(".json").write_text(json.dumps(found))


def metrics_of(step: int) -> dict[str, float]:
    """Numbers of a step, as a run on separate pools writes them."""
    return {
        "reward/mean": 0.5 + step / 100,
        "reward/std": 0.1,
        "reward/shapes": 0.5 + step / 100,
        "perf/step_s": 2.0,
        "perf/images_per_s": 48.0,
        "perf/images_per_s_per_device": 24.0,
        "perf/generate_s": 1.0,
        "perf/bubble_fraction/trainer": 0.25,
        "actor/grad_norm": 0.01,
        "reward/zero_spread_fraction": 1.0,
        **({"val/reward": 0.6 + step / 100} if step % 2 == 0 else {}),
    }


def make_run(run_dir: Path, *, num_steps: int = 4) -> Path:
    """Write the folder of a run on separate pools that has everything, with validations at even steps."""
    run_dir.mkdir(parents=True, exist_ok=True)
    append_metrics(run_dir / METRICS, 0, {"val/reward": 0.6})
    for step in range(1, num_steps + 1):
        append_metrics(run_dir / METRICS, step, metrics_of(step))
    for step in range(0, num_steps + 1, 2):
        add_validation(run_dir, step)
    add_groups(run_dir, 2)
    add_groups(run_dir, 4, rewards=(0.5, 0.75, 1.0))
    start = {
        "at_s": 0.0,  # long ago: hours with many digits
        "words": ["recipe=digen_quickstart", "trainer.total_training_steps=4"],
        "recipes": ["digen_quickstart"],
        "changes": [["trainer.total_training_steps", 60, 4]],
        "config": {"trainer": {"total_training_steps": 4}, "digen": {"loss": {"name": "flow_grpo"}, "empty": {}}},
        "notes": ["reward = 1.0 x shapes"],
        "versions": {"verl": "0.9.1"},
    }
    (run_dir / START).write_text(json.dumps(start))
    warning = {"at_s": 1.0, "step": 2, "level": "WARNING", "text": f"a prompt failed: {HOSTILE}"}
    (run_dir / WARNINGS).write_text(2 * (json.dumps(warning) + "\n"))
    intervals, num_devices = simulated_run()
    TimelineFile(run_dir / NAME, num_devices).append(intervals)
    return run_dir
