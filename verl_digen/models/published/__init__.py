# SPDX-License-Identifier: Apache-2.0
"""The config files of published checkpoints, so that a hub id is planned without a network or a download.

`index.json` has, by repository, the pipeline, and per folder its class and the name of a part (null: nothing of the
folder is planned, e.g. a tokenizer). `parts.json` has, by part, its config, the source of its text (`source`), and what
its size was compared with (`check`). Each repository is a checkpoint that our model files read, with the published
number of parameters (tests/plan/test_published.py).
"""

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
    """Known hub ids."""
    return tuple(_read("index.json"))


@contextmanager
def checkpoint_folder(path: str) -> Iterator[Path]:
    """The checkpoint at `actor_rollout_ref.model.path`: the local folder itself, or a temporary folder of configs.
    ValueError if it is neither a folder nor a known repository."""
    local = Path(path).expanduser()
    if local.is_dir():
        yield local
        return
    if path not in repositories():
        remedy = "download its config files (hf download REPO --include '*.json' --local-dir DIR)"
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
    library = {name: _LIBRARIES.get(name, "transformers") for name in entry["parts"]}
    index = {"_class_name": entry["pipeline"], **entry["index"]}
    index |= {name: [library[name], class_name] for name, (class_name, _) in entry["parts"].items()}
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
    for name, (_, part) in entry["parts"].items():
        (folder / name).mkdir()
        if part is not None:
            file = folder / name / _CONFIG_FILES.get(name, "config.json")
            file.write_text(json.dumps(parts[part]["config"]), encoding="utf-8")


_LIBRARIES = {
    **dict.fromkeys(("audio_vae", "guider", "scheduler", "transformer", "transformer_2", "vae"), "diffusers"),
    **dict.fromkeys(("connectors", "vocoder"), "ltx2"),
}
"""Folder -> library of its class in `model_index.json`, if it is not transformers. A pipeline with networks of its own
is named itself."""
_CONFIG_FILES = {
    "guider": "guider_config.json",
    "processor": "preprocessor_config.json",
    "scheduler": "scheduler_config.json",
}
"""Folder -> name of its config file, if it is not config.json."""


@cache
def _read(name: str) -> dict[str, Any]:
    return json.loads((files(__name__) / name).read_text(encoding="utf-8"))
