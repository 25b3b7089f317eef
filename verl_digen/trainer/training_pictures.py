# SPDX-License-Identifier: Apache-2.0
"""After a step whose groups are shown: their best and worst samples, and how each reward is distributed.

| where | what |
| --- | --- |
| `RUN_DIR/images/train_000010.png` | the grid |
| `RUN_DIR/images/train_000010.json` | its pictures, and `distribution/*`; read by the run's report |
| TensorBoard | `train/best_and_worst` (the grid), `distribution/reward`, `distribution/NAME` |
| W&B | the same names, each picture or video by itself |

Files come from the agent loop workers (`verl_digen.observe.group_pictures`). A task beside the run draws the grid and
writes TensorBoard's files. Who waits: the next such step, and the end of the run. Bound: `digen.deadlines.setup_s`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from omegaconf import DictConfig

from verl_digen.config import DigenConfig
from verl_digen.observe.group_pictures import best_and_worst, is_group_logged, is_step_logged
from verl_digen.observe.images import Shown, save_grid
from verl_digen.observe.run_files import group_dir, replace_text
from verl_digen.observe.trackers import log_histograms, log_pictures, log_to_wandb
from verl_digen.reward.named import has_custom
from verl_digen.store.keys import group_number
from verl_digen.types import SampleTag

PICTURES = "train/best_and_worst"


class TrainingPictures:
    """See the module.

    Args:
        num_prompts: groups of a step.
        rewards: names of the rewards.
        to_tensorboard: also write there.
        begin: starts `draw` with its arguments -> a Ray reference to wait for, or None.
    """

    def __init__(
        self,
        digen: DigenConfig,
        run_dir: Path,
        *,
        num_prompts: int,
        rewards: Sequence[str],
        to_tensorboard: bool,
        begin: Callable[..., Any] = lambda *arguments: ray.remote(num_cpus=0)(draw).remote(*arguments),
    ):
        self._digen, self._run_dir, self._num_prompts = digen, run_dir, num_prompts
        self._rewards, self._to_tensorboard = tuple(rewards), to_tensorboard
        self._begin = begin
        self._drawn: Any = None

    @classmethod
    def of_run(cls, config: DictConfig, digen: DigenConfig, run_dir: Path) -> TrainingPictures:
        return cls(
            digen,
            run_dir,
            num_prompts=config.data.train_batch_size,
            rewards=list(digen.reward.weights(has_custom=has_custom(config))),
            to_tensorboard="tensorboard" in config.trainer.logger,
        )

    def log(self, step: int, samples: Mapping[str, SampleTag], wandb: Any | None) -> None:
        """Show the groups of `step`, if it is one of those that are shown.

        Args:
            samples: key -> tag of each trained sample.
            wandb: the module, if the run logs there.
        """
        if not is_step_logged(self._digen, step):
            return
        shown = best_and_worst(self._run_dir, step, self._groups(step, samples))
        values = distributions(list(samples.values()), self._rewards)
        if wandb is not None:
            log_to_wandb(wandb, step, {PICTURES: shown}, values)
        self.finish()
        self._drawn = self._begin(self._run_dir, step, shown, values, self._to_tensorboard)

    def _groups(self, step: int, samples: Mapping[str, SampleTag]) -> dict[str, dict[int, SampleTag]]:
        """The groups to show, at most `digen.num_logged_groups`."""
        groups: dict[str, dict[int, SampleTag]] = {}
        for tag in samples.values():
            number = group_number(tag.facts.uid)
            if is_group_logged(self._digen, step=step, number=number, num_prompts=self._num_prompts):
                groups.setdefault(tag.facts.uid, {})[tag.facts.sample_index] = tag
        return dict(sorted(groups.items())[: self._digen.num_logged_groups])

    def finish(self) -> None:
        """Wait until the last ones are drawn."""
        if self._drawn is not None:
            ray.get(self._drawn, timeout=self._digen.deadlines.setup_s)


def distributions(tags: Sequence[SampleTag], rewards: Sequence[str]) -> dict[str, list[float]]:
    """`distribution/*`: values of the samples of a step, of the reward and of each part that scored any of them."""
    parts = {name: [tag.parts[name] for tag in tags if name in tag.parts] for name in rewards}
    return {
        "distribution/reward": [tag.reward for tag in tags],
        **{f"distribution/{name}": values for name, values in parts.items() if values},
    }


def draw(
    run_dir: Path, step: int, shown: Sequence[Shown], values: Mapping[str, Sequence[float]], to_tensorboard: bool
) -> None:
    """Draw the grid, and write what it shows and `values` beside it; to TensorBoard too, into a folder of their own."""
    grid = group_dir(run_dir, step).with_suffix(".png")
    entries = [{"file": entry.path.name, "prompt": entry.prompt, "reward": entry.reward} for entry in shown]
    grid.parent.mkdir(parents=True, exist_ok=True)
    replace_text(grid.with_suffix(".json"), json.dumps({"shown": entries, "values": dict(values)}))
    if shown:
        save_grid(shown, grid, f"training groups of step {step}: best and worst")
    if to_tensorboard:
        folder = run_dir / "tensorboard" / "training"
        if shown:
            log_pictures(folder, step, {PICTURES: grid})
        log_histograms(folder, step, values)
