# SPDX-License-Identifier: Apache-2.0
"""Validation: every prompt to the agent loops, deterministically, from the same noise each time; metrics; pictures."""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from verl_digen.config import DigenConfig
from verl_digen.data.rows import ROW, prompt_batch
from verl_digen.errors import RunStopped
from verl_digen.observe.images import Shown, save_before_after, save_grid
from verl_digen.observe.metrics import reward_metrics
from verl_digen.observe.run_files import VALIDATED, image_path, pictured_steps, replace_text, step_dir, video_path
from verl_digen.observe.trackers import log_to_tensorboard, log_to_wandb
from verl_digen.processes.supervision import Supervision
from verl_digen.store.keys import VAL, validation_uid
from verl_digen.store.samples import PromptStatus, clear, list_partition, submit_prompts
from verl_digen.trainer.replay_buffer import POLL_INTERVAL_S
from verl_digen.trainer.run_output import Beside
from verl_digen.trainer.turns import num_events
from verl_digen.types import PromptRow, SampleTag

logger = logging.getLogger(__name__)


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


class Validation:
    """Validates the weights that the replicas have; pictures also go to TensorBoard, if the run logs there."""

    def __init__(
        self, config: DictConfig, digen: DigenConfig, supervision: Supervision, *, poll_s: float = POLL_INTERVAL_S
    ):
        self._digen, self._supervision, self._poll_s = digen, supervision, poll_s
        self._run_dir = Path(config.trainer.default_local_dir)
        self._num_samples = config.actor_rollout_ref.rollout.val_kwargs.n
        self._to_tensorboard = "tensorboard" in config.trainer.logger
        self.drawing = Beside("pictures of the last validation", digen.deadlines.setup_s)
        self.on_batch: Callable[[], None] = lambda: None
        """Called before a batch of prompts goes to the agent loops."""
        self.on_poll: Callable[[Iterable[PromptStatus]], None] = lambda prompts: None
        """Called with the prompts of the batch whenever they were looked at, while some have not ended."""
        self.replace_all_lost: Callable[[], bool] = lambda: False
        """Called when prompts failed; True if no replica was alive, and one is now: they are generated again."""

    def run(
        self,
        loader: Iterable[Mapping[str, Any]],
        generate: Callable[[TensorDict], Any],
        *,
        step: int,
        wandb: Any | None = None,
    ) -> dict[str, float]:
        """Validate the loader's prompts, whose batches `generate` hands to the agent loops -> `val/*`. Pictures are
        drawn in the background (`drawing`). RunStopped if every prompt of a batch failed."""
        tags: dict[str, SampleTag] = {}
        num_samples = 0
        for columns in loader:
            rows = [replace(row, uid=validation_uid(row.index)) for row in columns[ROW]]
            num_samples += len(rows) * self._num_samples
            reasons = self.generate(rows, generate, step, tags)
            for reason, count in Counter(reasons).items():
                logger.warning("%d of %d validation prompts failed: %s", count, len(rows), reason)
            if len(reasons) == len(rows):
                raise RunStopped(f"validation at step {step}: every prompt failed; the last: {reasons[-1]}")
        if shown := shown_samples(self._run_dir, step, tags, self._digen.num_logged_images):
            self.drawing.begin(draw_pictures, self._run_dir, step, shown, self._to_tensorboard)
        if wandb is not None:
            log_to_wandb(wandb, step, {"val/pictures": list(shown.values())}, {})
        metrics = validation_metrics(tags, num_samples)
        logger.info("validation after %d steps: reward %.4f over %d pictures", step, metrics["val/reward"], len(tags))
        return metrics

    def generate(
        self, rows: Sequence[PromptRow], generate: Callable[[TensorDict], Any], step: int, tags: dict[str, SampleTag]
    ) -> list[str]:
        """Have the prompts generated, move their samples' tags into `tags` -> the reasons of failures."""
        while True:
            batch, uids = prompt_batch(rows), [row.uid for row in rows]
            tu.assign_non_tensor_data(batch, "global_steps", step)
            tu.assign_non_tensor_data(batch, "validate", True)
            self.on_batch()
            submit_prompts(VAL, uids, step)
            generate(batch)
            reasons = self._wait(uids, tags)
            if not (reasons and self.replace_all_lost()):
                return list(reasons.values())
            rows = [row for row in rows if row.uid in reasons]

    def _wait(self, uids: list[str], tags: dict[str, SampleTag]) -> dict[str, str]:
        """Wait for the prompts, move their samples' tags into `tags`, clear them -> uid: reason, of those that failed.
        DeadlineMissed if none ended for `digen.deadlines.no_progress_s`; a hung replica is detected earlier."""
        self._supervision.patience.restart()
        while True:
            found = list_partition(VAL)
            ended = [uid for uid in uids if found.prompts[uid].has_ended]
            if len(ended) == len(uids):
                break
            step = self._supervision.step()
            what = f"validation after step {step} ({len(ended)} of {len(uids)} prompts have ended)"
            prompts = [found.prompts[uid] for uid in uids]
            self._supervision.check_progress(num_events(prompts), what)
            self.on_poll(prompts)
            time.sleep(self._poll_s)
        reasons = {uid: found.prompts[uid].error for uid in uids if found.prompts[uid].status == "failure"}
        tags.update(found.samples)
        clear(VAL, [*uids, *found.samples])
        return reasons


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
    save_grid([(f"validation after {step} steps", list(shown.values()))], grid)
    if to_tensorboard:
        videos = {f"val/videos/{uid}": video_path(one.path) for uid, one in shown.items()}
        pictures = {"val/pictures": grid, **{tag: path for tag, path in videos.items() if path.is_file()}}
        rewards = [["prompt", "reward"], *([one.prompt, f"{one.reward:.4f}"] for one in shown.values())]
        log_to_tensorboard(run_dir / "tensorboard" / "pictures", step, pictures, {}, {"val/rewards": rewards})
    steps = pictured_steps(run_dir, VALIDATED)
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
