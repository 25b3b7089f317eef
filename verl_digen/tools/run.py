# SPDX-License-Identifier: Apache-2.0
"""`verl_digen.Run`: a run's folder in a program or a notebook. No Ray, no ranks.

run = verl_digen.Run("outputs/digen/quickstart")
run                                                   # in a notebook: a table with state, steps and rewards
run.metrics.plot(x="step", y="reward/mean")
run.pictures[run.best][0].image                       # of the first prompt, at the best validation
run.sample(["a red circle"], step=run.best)[0].show()
run.export(format="peft")                             # the folder that was written
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_digen.observe.run_files import METRICS, START, VALIDATION, image_path, pictured_steps, step_dir
from verl_digen.report.curves import read_rows
from verl_digen.report.pictures import entries
from verl_digen.report.runs import is_run, line_of
from verl_digen.require import require

if TYPE_CHECKING:  # heavy
    from pandas import DataFrame
    from PIL.Image import Image

SHOWN = ("state", "recipe", "step", "steps", "validation", "best", "best_step", "reward", "samples_per_s", "hours")
"""Parts of the line about a run that a notebook shows."""


@dataclass(frozen=True)
class Picture:
    """Sample of a validation."""

    prompt: str
    reward: float
    path: Path
    """A PNG; of a video its filmstrip."""

    @property
    def image(self) -> Image:
        """The picture."""
        from PIL import Image

        return Image.open(self.path)

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Run:
    """A run's folder, its `trainer.default_local_dir`. Everything is read when it is asked for, so a run that goes on
    shows its newest step.

    Raises:
        ValueError: the folder holds no run.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        require(
            is_run(self.folder),
            f"folder must be that of a run, with a {METRICS} (its trainer.default_local_dir)",
            str(folder),
            "digen watch lists the runs below a folder",
        )

    @property
    def summary(self) -> dict[str, Any]:
        """State and numbers, as `digen watch` lists them, see `report.runs.line_of`."""
        return line_of(self.folder.resolve().name, self.folder)

    @property
    def metrics(self) -> DataFrame:
        """A row per step, a column per metric (docs/metrics.md); NaN where a step has none."""
        from pandas import DataFrame

        return DataFrame(read_rows(self.folder / METRICS))

    @property
    def best(self) -> int:
        """Step of the best validation.

        Raises:
            ValueError: there is none yet.
        """
        found = self.summary["best_step"]
        require(
            found is not None, f"{self.folder} must have a validation", "none", "set trainer.test_freq, or wait for it"
        )
        return found

    @property
    def pictures(self) -> dict[int, list[Picture]]:
        """Step -> samples of its validation, in the order of the prompts."""
        return {
            step: [
                Picture(entry["prompt"], entry["reward"], image_path(self.folder, step, entry["uid"]))
                for entry in entries(step_dir(self.folder, step))
            ]
            for step in pictured_steps(self.folder, VALIDATION)
        }

    @property
    def config(self) -> Any:
        """The whole config of the newest start, with interpolations resolved; {} where there is no `start.json`."""
        from omegaconf import OmegaConf

        path = self.folder / START
        return OmegaConf.create(json.loads(path.read_text(encoding="utf-8"))["config"] if path.is_file() else {})

    @property
    def checkpoints(self) -> list[int]:
        """Steps of the complete checkpoints, in order: those that `sample` and `export` take."""
        import verl  # noqa: F401 - loads the plugin

        from verl_digen.tools.export.saved_run import saved_steps

        return saved_steps(self.folder)

    def sample(
        self,
        prompts: str | Sequence[str],
        *,
        num: int = 1,
        step: int | None = None,
        policy: str = "current",
        **changes: Any,
    ) -> list[Image]:
        """Draw `num` pictures of each prompt in this process, as `digen sample` does; of a video its filmstrip.

        Args:
            step: of the checkpoint; the newest one unless given. changes: `seed`, `num_steps`, `size_px` of `Changes`.
        """
        import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names
        from PIL import Image

        from verl_digen.observe.images import filmstrip
        from verl_digen.tools.export.pictures import Changes, Painter, changed, rows_of
        from verl_digen.tools.export.saved_run import open_run

        saved = open_run(self.folder, step, None)
        rows = rows_of(saved, [prompts] if isinstance(prompts, str) else prompts, None)
        painter = Painter(saved, policy, changed(saved.digen, Changes(**changes)))
        drawn = [pixels for row in rows for pixels, _ in painter.draw(row, num)]
        return [Image.fromarray((filmstrip(one) if one.ndim == 4 else one).cpu().numpy()) for one in drawn]

    def export(self, **options: Any) -> Path:
        """Export a checkpoint -> the folder that was written; options are those of `export_command.export`."""
        from verl_digen.tools.export.export_command import export

        return export(self.folder, **options)

    def _repr_html_(self) -> str:
        """Show a short table, in a notebook."""
        found = self.summary
        cells = [(name.replace("_", " "), found[name]) for name in SHOWN if found[name] not in (None, "")]
        lines = "".join(f"<tr><th>{word}</th><td>{escape(str(value))}</td></tr>" for word, value in cells)
        return f"<b>{escape(str(self.folder))}</b><table>{lines}</table>"
