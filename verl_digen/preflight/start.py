# SPDX-License-Identifier: Apache-2.0
"""`RUN_DIR/start.json`: what the newest start of a run was given; read by the run's report.

| key | content |
| --- | --- |
| `words` | the command line after `python -m verl.trainer.main_ppo` |
| `at_s` | unix time |
| `recipes` | names of the recipes |
| `changes` | [key, value of the recipes alone, value of the run] for each value that the other words changed |
| `config` | the whole config, with interpolations resolved |
| `notes` | what was said before the run started |
| `versions` | package -> version |
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from verl_digen.hardware.versions import installed
from verl_digen.observe.run_files import START, replace_text
from verl_digen.preflight.recipes import GROUP_WORD, command_line, named_recipes
from verl_digen.report.summary import leaves

MISSING = "(not there)"
"""Stands for the value of a key that one of two configs does not have."""


def save_start(config: DictConfig, notes: Sequence[str]) -> None:
    """Write the file, while Hydra runs the job.

    Raises:
        OSError: it cannot be written.
    """
    words = command_line(config)
    of_recipes = compose(config.hydra.job.config_name, overrides=[word for word in words if GROUP_WORD.match(word)])
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    found = {
        "words": words,
        "at_s": time.time(),
        "recipes": named_recipes(config),
        "changes": list(changes(of_recipes, config)),
        "config": _plain(config, resolve=True),
        "notes": list(notes),
        "versions": {"python": platform.python_version(), **installed()},
    }
    replace_text(run_dir / START, json.dumps(found, default=str))


def changes(before: DictConfig, after: DictConfig) -> Iterator[tuple[str, Any, Any]]:
    """(key, value before, value after) of every value that differs; interpolations as they are written."""
    old, new = (dict(leaves("", _plain(config, resolve=False))) for config in (before, after))
    for key in sorted(old.keys() | new.keys()):
        values = old.get(key, MISSING), new.get(key, MISSING)
        if values[0] != values[1]:
            yield key, *values


def _plain(config: DictConfig, *, resolve: bool) -> dict[str, Any]:
    """The config as plain values, without Hydra's own section."""
    shown = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    values = OmegaConf.to_container(shown, resolve=resolve)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}
