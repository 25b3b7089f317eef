# SPDX-License-Identifier: Apache-2.0
"""`verl_digen.train` and `verl_digen.Run`: a run, and its folder, in a program or a notebook.

run = verl_digen.train("digen_quickstart", ["a red circle"], redness, **{"trainer.total_training_steps": 3})
run = verl_digen.Run("outputs/digen/quickstart")      # no Ray, no ranks
run.metrics.plot(x="step", y="reward/mean")
run.pictures[run.best][0].image                       # of the first prompt, at the best validation
run.sample(["a red circle"], step=run.best)[0].show()
run.export(format="peft")                             # the folder that was written
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from verl_digen.observe.run_files import METRICS, START, VALIDATED, image_path, json_in, pictured_steps, step_dir
from verl_digen.report.curves import read_rows
from verl_digen.report.pictures import entries
from verl_digen.report.runs import line_of, require_run
from verl_digen.require import refusing, require
from verl_digen.tools.train.launcher import launch

if TYPE_CHECKING:
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
    def image(self) -> "Image":
        from PIL import Image

        return Image.open(self.path)

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Run:
    """A run's folder, its `trainer.default_local_dir`. Everything is read when it is asked for, so a run that goes on
    shows its newest step. Raises ValueError if the folder holds no run."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        require_run(self.folder, "folder")

    @property
    def summary(self) -> dict[str, Any]:
        """State and numbers, as `digen watch` lists them, see `report.runs.line_of`."""
        return line_of(self.folder.resolve().name, self.folder)

    @property
    def metrics(self) -> "DataFrame":
        """A row per step, a column per metric (docs/metrics.md); NaN where a step has none."""
        from pandas import DataFrame

        return DataFrame(read_rows(self.folder / METRICS))

    @property
    def best(self) -> int:
        """Step of the best validation. Raises ValueError if there is none yet."""
        found = self.summary["best_step"]
        rule = f"{self.folder} must have a validation"
        require(found is not None, rule, "none", "set trainer.test_freq, or wait for it")
        return found

    @property
    def pictures(self) -> dict[int, list[Picture]]:
        """Step -> samples of its validation, in the order of the prompts."""
        return {
            step: [
                Picture(entry["prompt"], entry["reward"], image_path(self.folder, step, entry["uid"]))
                for entry in entries(step_dir(self.folder, step))
            ]
            for step in pictured_steps(self.folder, VALIDATED)
        }

    @property
    def config(self) -> Any:
        """The whole config of the newest start, with interpolations resolved; {} where there is no `start.json`."""
        from omegaconf import OmegaConf

        path = self.folder / START
        return OmegaConf.create(json_in(path, "config")["config"] if path.is_file() else {})

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
    ) -> "list[Image]":
        """Draw `num` pictures of each prompt in this process, as `digen sample` does; of a video its filmstrip. `step`:
        of the checkpoint, the newest one by default; `changes`: `seed`, `num_steps` and `size_px`."""
        import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names
        from PIL import Image

        from verl_digen.observe.images import filmstrip
        from verl_digen.tools.export.pictures import Painter, changed, rows_of
        from verl_digen.tools.export.saved_run import open_run

        saved = open_run(self.folder, step, None)
        rows = rows_of(saved, [prompts] if isinstance(prompts, str) else prompts, None)
        painter = Painter(saved, policy, changed(saved.digen, **changes))
        drawn = [pixels for row in rows for pixels, _ in painter.draw(row, num)]
        return [Image.fromarray((filmstrip(one) if one.ndim == 4 else one).cpu().numpy()) for one in drawn]

    def export(self, **options: Any) -> Path:
        """Export a checkpoint -> the folder that was written; options as of `formats.export`."""
        import verl  # noqa: F401 - loads the plugin, and with it the classes that a config names

        from verl_digen.tools.export.formats import export

        return export(self.folder, **options)

    def _repr_html_(self) -> str:
        """Show a short table, in a notebook."""
        found = self.summary
        cells = [(name.replace("_", " "), found[name]) for name in SHOWN if found[name] not in (None, "")]
        lines = "".join(f"<tr><th>{word}</th><td>{escape(str(value))}</td></tr>" for word, value in cells)
        return f"<b>{escape(str(self.folder))}</b><table>{lines}</table>"


FOLDER, FUNCTIONS = "trainer.default_local_dir", "digen.reward.functions"  # `verl_digen.config` imports torch
PICKLED = '''"""A reward that was given to `verl_digen.train` as an object."""

import pickle
from pathlib import Path

reward = pickle.loads(Path(__file__).with_suffix(".pkl").read_bytes())
'''


def train(
    recipe: str,
    prompts: Sequence[str | Mapping[str, Any]] | None = None,
    reward: Any = None,
    *,
    val_prompts: Sequence[str | Mapping[str, Any]] | None = None,
    show: Callable[[str], None] = print,
    **keys: Any,
) -> Run:
    """Train in a process of its own, as `digen train` does, and wait for its end.

    Args:
        recipe: such as "digen_sd3+nft".
        prompts: texts, or rows as in a prompt file; the recipe's files if left out.
        reward: a name, "FILE.py:NAME", a mapping as `digen.reward.functions`, or a function or class, which is pickled
            with the globals that it uses if a notebook, script or function defines it. The recipe's if left out.
        val_prompts: the same as `prompts` if left out.
        show: gets the lines that `digen train` prints.
        keys: keys of the config, e.g. `**{"trainer.total_training_steps": 3}`. Without `trainer.default_local_dir`
            and `trainer.experiment_name` the folder is new: outputs/digen/RECIPE-DATE.

    Raises:
        ValueError: the run was refused, or the reward cannot be pickled.
        RuntimeError: it failed.
        KeyboardInterrupt: it was ended before its step was.
    """
    given = dict(keys)
    dated = f"{recipe.removeprefix('digen_')}-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    names = given.get("trainer.project_name", "digen"), given.get("trainer.experiment_name", dated)
    run_dir = Path(given.setdefault(FOLDER, Path("outputs", *map(str, names))))
    if prompts is not None:
        given["data.train_files"] = given["data.val_files"] = _written(run_dir, "prompts", prompts)
    if val_prompts is not None:
        given["data.val_files"] = _written(run_dir, "val_prompts", val_prompts)
    if reward is not None:
        given[FUNCTIONS] = rewards_of(reward, run_dir)
    ended = launch([f"recipe={recipe}", *(f"{key}={word_of(value)}" for key, value in given.items())], show=show)
    if ended.exit_code == 0:
        return Run(run_dir)
    if ended.asked_by is not None:
        raise KeyboardInterrupt
    raise (ValueError if ended.exit_code == 2 else RuntimeError)(ended.reason)


def rewards_of(reward: Any, run_dir: Path) -> Mapping[str, Any]:
    """Value of `digen.reward.functions` for one reward; a pickled one is written to the folder.

    Example:
        rewards_of("ocr", folder)             # {"ocr": 1.0}
        rewards_of("red.py:redness", folder)  # {"redness": {"weight": 1.0, "reward": "red.py:redness"}}
    """
    if isinstance(reward, Mapping):
        return reward
    if isinstance(reward, str):
        name = re.split("[:.]", reward)[-1]
        return {name: 1.0 if name == reward else {"weight": 1.0, "reward": reward}}
    require(callable(reward), "reward must be a name, a mapping, a function or a class", reward, "see docs/rewards.md")
    has_name = isinstance(reward, type | FunctionType)  # a partial has none
    module, name = (reward.__module__, reward.__qualname__) if has_name else ("__main__", "reward")
    target = f"{module}.{name}"
    if module == "__main__" or "." in name:  # no other process can import it
        target = f"{_pickled(reward, run_dir)}:reward"
    name = name.rpartition(".")[2]
    return {name if name.isidentifier() else "reward": {"weight": 1.0, "reward": target}}


def word_of(value: Any) -> str:
    """Value as Hydra reads it on a command line.

    Example:
        word_of({"a": [1, None, "it's"]})  # "{a: [1, null, 'it\\'s']}"
    """
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {word_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(word_of, value))}]"
    if isinstance(value, str | Path):
        return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", r"\'"), str(value)) + "'"
    return json.dumps(value)


def _written(run_dir: Path, name: str, prompts: Sequence[str | Mapping[str, Any]]) -> Path:
    remedy = "write [TEXT], or give a file by **{'data.train_files': FILE}"
    require(not isinstance(prompts, str | Mapping), f"{name} must be a list of texts or rows", prompts, remedy)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = (run_dir / f"{name}.jsonl").absolute()
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts), encoding="utf-8")
    return path


def _pickled(reward: Any, run_dir: Path) -> Path:
    """File that loads the pickled object."""
    from ray import cloudpickle  # takes a second

    rule = "reward must be a function or class that can be pickled for other processes"
    with refusing(rule, reward, "have it make inside what it holds, or put it into a file and give FILE.py:NAME"):
        content = cloudpickle.dumps(reward)  # pyright: ignore[reportPrivateImportUsage]
    run_dir.mkdir(parents=True, exist_ok=True)
    path = (run_dir / "reward.py").absolute()
    path.with_suffix(".pkl").write_bytes(content)
    path.write_text(PICKLED)
    return path
