# SPDX-License-Identifier: Apache-2.0
"""The config files of published checkpoints, so that a hub id is planned without a network or a download.

- `models/published/index.json`: repository -> pipeline, and per folder its class and the name of a part (null: a
  folder of which nothing is planned, e.g. a tokenizer). `revision` is that of the repository, where it is known.
- `models/published/parts.json`: part -> config, where its text comes from (`source`), and what its size was compared
  with (`check`).
- The folder made here has configs alone. It is a checkpoint for whatever reads no weights.

Invariant (tests/plan/test_published.py): every repository is a checkpoint our model files read, whose networks have
as many parameters as published.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verl_digen.models.locate import HUB_ID


def repositories() -> tuple[str, ...]:
    """Hub ids that are known."""
    return tuple(_read("index.json"))


@contextmanager
def checkpoint_folder(path: str) -> Iterator[Path]:
    """The checkpoint at `actor_rollout_ref.model.path`: a local folder as it is, else a folder of configs, which is
    removed again.

    Raises:
        ValueError: neither a folder nor a repository that is known.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        yield local
        return
    if path not in repositories():
        remedy = "download its config files (huggingface-cli download REPO --include '*.json' --local-dir DIR)"
        raise ValueError(
            f"actor_rollout_ref.model.path must be a folder, or one of {', '.join(repositories())}, to be planned, got "
            f"{path!r}; {remedy + ' and give the folder' if HUB_ID.fullmatch(path) else 'check the path'}"
        )
    with TemporaryDirectory(prefix="digen_plan_") as folder:
        write_configs(path, Path(folder))
        yield Path(folder)


def write_configs(repository: str, folder: Path) -> None:
    """Write the config files of a known repository into `folder`."""
    entry, parts = _read("index.json")[repository], _read("parts.json")
    library = {name: "diffusers" if name in _OF_DIFFUSERS else "transformers" for name in entry["parts"]}
    index = {"_class_name": entry["pipeline"], **entry["index"]}
    index |= {name: [library[name], class_name] for name, (class_name, _) in entry["parts"].items()}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    for name, (_, part) in entry["parts"].items():
        (folder / name).mkdir()
        if part is not None:
            file = folder / name / _CONFIG_FILES.get(name, "config.json")
            file.write_text(json.dumps(parts[part]["config"]), encoding="utf-8")


_OF_DIFFUSERS = frozenset({"guider", "scheduler", "transformer", "transformer_2", "vae"})
_CONFIG_FILES = {"guider": "guider_config.json", "scheduler": "scheduler_config.json"}
"""What is not called config.json."""


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((files("verl_digen") / "models" / "published" / name).read_text(encoding="utf-8"))
