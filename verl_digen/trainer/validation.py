# SPDX-License-Identifier: Apache-2.0
"""Validation: every validation prompt, deterministically, under the same noise each time, so that runs are
comparable."""

import json
from collections.abc import Mapping
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_digen.observe.images import Shown, save_before_after, save_grid
from verl_digen.observe.metrics import reward_metrics
from verl_digen.observe.run_files import VALIDATION, image_path, pictured_steps, replace_text, step_dir, video_path
from verl_digen.observe.trackers import log_to_tensorboard
from verl_digen.types import SampleTag


def allow_no_prompts(config: DictConfig) -> None:
    """Let verl make an empty loader of validation prompts, for a run that does not validate and names none. verl's
    default batch size is the number of prompts; torch refuses a batch size of 0 and to shuffle an empty set."""
    if OmegaConf.select(config, "data.val_files") is None:
        with open_dict(config.data):
            config.data.update(val_files=None, val_batch_size=1, validation_shuffle=False)


def take_all_steps(config: DictConfig) -> None:
    """Let `trainer.total_training_steps` alone end a run, where it is given. verl's loop also ends after
    `trainer.total_epochs`, then without the last checkpoint and validation. A pass has at least one step."""
    steps = config.trainer.total_training_steps
    if steps is not None:
        config.trainer.total_epochs = max(config.trainer.total_epochs, steps)


def validation_uid(index: int) -> str:
    """The group id, and so the noise, of the validation prompt at `index`: the same at every validation."""
    return f"val-{index:05d}"


def validation_metrics(tags: Mapping[str, SampleTag], num_samples: int) -> dict[str, float]:
    """`val/*` of one validation. `tags`: sample key -> tag; `num_samples`: number of samples requested."""
    rewards = reward_metrics([tags[key] for key in sorted(tags)])
    metrics = {name.replace("reward/", "val/reward_", 1): value for name, value in rewards.items()}
    metrics["val/reward"] = metrics.pop("val/reward_mean")
    metrics["val/failed_samples"] = float(num_samples - len(tags))
    by_source: dict[str, list[float]] = {}
    for tag in tags.values():
        by_source.setdefault(tag.data_source, []).append(tag.reward)
    if len(by_source) > 1:
        metrics |= {f"val/{source}/reward": sum(values) / len(values) for source, values in by_source.items()}
    return metrics


def shown_samples(run_dir: Path, step: int, tags: Mapping[str, SampleTag], num_logged: int) -> dict[str, Shown]:
    """Group id -> picture of the first sample, of the first `num_logged` validation prompts."""
    first_samples = {tag.facts.uid: tag for tag in tags.values() if tag.facts.sample_index == 0}
    uids = [validation_uid(index) for index in range(num_logged)]
    return {
        uid: Shown(image_path(run_dir, step, uid), first_samples[uid].prompt, first_samples[uid].reward)
        for uid in uids
        if uid in first_samples
    }


def draw_pictures(run_dir: Path, step: int, shown: Mapping[str, Shown], to_tensorboard: bool) -> None:
    """Draw the grid of this validation and the before/after picture; if asked, send the grid and the videos to
    TensorBoard."""
    grid = step_dir(run_dir, step).with_suffix(".png")
    entries = [
        {"uid": uid, "file_name": _moving_or_still(one.path).name, "prompt": one.prompt, "reward": one.reward}
        for uid, one in shown.items()
    ]
    replace_text(step_dir(run_dir, step).with_suffix(".json"), json.dumps(entries))
    save_grid(list(shown.values()), grid, f"validation after {step} steps")
    if to_tensorboard:
        videos = {f"val/videos/{uid}": video_path(one.path) for uid, one in shown.items()}
        pictures = {"val/pictures": grid, **{tag: path for tag, path in videos.items() if path.is_file()}}
        rewards = [["prompt", "reward"], *([one.prompt, f"{one.reward:.4f}"] for one in shown.values())]
        log_to_tensorboard(run_dir / "tensorboard" / "pictures", step, pictures, {}, {"val/rewards": rewards})
    steps = pictured_steps(run_dir, VALIDATION)
    first, last = steps[0], steps[-1]
    if first != last:
        save_before_after(
            _load(run_dir, first),
            _load(run_dir, last),
            run_dir / "images" / "before_after.png",
            (f"after {first} steps", f"after {last} steps"),
        )


def _moving_or_still(path: Path) -> Path:
    video = video_path(path)
    return video if video.is_file() else path


def _load(run_dir: Path, step: int) -> list[Shown]:
    entries = json.loads(step_dir(run_dir, step).with_suffix(".json").read_text())
    return [Shown(image_path(run_dir, step, entry["uid"]), entry["prompt"], entry["reward"]) for entry in entries]
