# SPDX-License-Identifier: Apache-2.0
"""`verl_digen.train`: a run from a program or a notebook.

run = verl_digen.train("digen_quickstart", ["a red circle"], redness, **{"trainer.total_training_steps": 3})
run.metrics["reward/mean"]
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from verl_digen.require import require
from verl_digen.tools.run import Run
from verl_digen.tools.train.launcher import launch

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
        prompts: texts, or rows as those of a prompt file; the recipe's files if left out.
        reward: a name, "FILE.py:NAME", a mapping as `digen.reward.functions`, or a function or class, which is pickled
            with the globals that it uses if a notebook, script or function defines it. The recipe's if left out.
        val_prompts: the same as `prompts` if left out.
        show: gets the lines that `digen train` prints.
        keys: keys of the config, e.g. `**{"trainer.total_training_steps": 3}`. Without `trainer.default_local_dir` the
            folder is new: outputs/digen/RECIPE-DATE.

    Raises:
        ValueError: the run was refused, or the reward cannot be pickled.
        RuntimeError: it failed.
        KeyboardInterrupt: it was ended before its step was.
    """
    given = dict(keys)
    name = f"{recipe.removeprefix('digen_')}-{datetime.now():%Y-%m-%d_%H-%M-%S}"
    run_dir = Path(given.setdefault(FOLDER, Path("outputs") / "digen" / name))
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
    module, name = reward.__module__, reward.__qualname__
    target = f"{module}.{name}"
    if module == "__main__" or "." in name:  # no other process can import it
        target = f"{_pickled(reward, run_dir)}:reward"
    name = reward.__name__
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
    run_dir.mkdir(parents=True, exist_ok=True)
    path = (run_dir / f"{name}.jsonl").absolute()
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in prompts), encoding="utf-8")
    return path


def _pickled(reward: Any, run_dir: Path) -> Path:
    """File that loads the pickled object."""
    from ray import cloudpickle  # takes a second

    try:
        content = cloudpickle.dumps(reward)  # pyright: ignore[reportPrivateImportUsage]
    except Exception as error:  # of any object that it holds
        raise ValueError(
            f"reward must be a function or class that can be pickled for other processes, got {reward.__qualname__} "
            f"({error}); have it make inside what it holds, or put it into a file and give FILE.py:NAME"
        ) from error
    run_dir.mkdir(parents=True, exist_ok=True)
    path = (run_dir / "reward.py").absolute()
    path.with_suffix(".pkl").write_bytes(content)
    path.write_text(PICKLED)
    return path
