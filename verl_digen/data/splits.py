# SPDX-License-Identifier: Apache-2.0
"""Values of `data.train_files` and `data.val_files`, see docs/data.md: files, folders with a file per split, folders
that `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote, and datasets of the hub.

The split of `data.val_files` is the one of its names in `SPLITS` that is there; on the hub it is "test" unless the name
says another one.
"""

import json
import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_digen.data.files import SUFFIXES, kind_of, readable
from verl_digen.inputs.tables import HUB, HubName
from verl_digen.require import shown

TRAIN, VAL = "data.train_files", "data.val_files"
SPLITS: Mapping[str, Sequence[str]] = {TRAIN: ("train",), VAL: ("test", "validation", "val")}
"""Key -> names of its split. The first one is the default for a dataset of the hub."""
ENDINGS = ("", "_metadata")
"""Words that may follow a split in the name of its file: flow_grpo's GenEval prompts are in train_metadata.jsonl."""
SAVED_DICT = "dataset_dict.json"
"""File in a folder that `DatasetDict.save_to_disk` wrote: {"splits": [...]}; each split is a folder in it."""
SAVED = "state.json"
"""File in a folder that `Dataset.save_to_disk` wrote."""


def resolve(files: Any, key: str) -> list[str]:
    """Paths and names that hold one split each, in order; `files` is one of them or a list, typed under `key`. A list
    that was resolved stays as it is. ValueError: a value that is no path; a folder without exactly one file of the
    split; a malformed hub name."""
    given = [files] if isinstance(files, str) else files
    if not isinstance(given, list | tuple) or not given or not all(isinstance(one, str) and one for one in given):
        raise ValueError(
            f"{key} must name a prompt file or a list of them, got {shown(files)}; give a path to one of "
            f"{', '.join(SUFFIXES)}"
        )
    return [_resolve_one(one, key) for one in given]


def name_splits(config: DictConfig) -> None:
    """Replace folders in `data.train_files` and `data.val_files` by the files of their splits: verl makes both data
    sets by one constructor, which does not learn which of them it makes."""
    for key in SPLITS:
        given = OmegaConf.select(config, key)
        if given is not None:
            files: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) else given
            with open_dict(config):
                OmegaConf.update(config, key, resolve(files, key), merge=False)


def _resolve_one(name: str, key: str) -> str:
    if name.startswith(HUB):
        hub = HubName.parse(name, key)
        return str(replace(hub, split=hub.split or SPLITS[key][0]))
    path = Path(os.path.expanduser(name))
    with readable(name, key):
        is_folder = path.is_dir() and not (path / SAVED).is_file()
        return str(_split_of(path, key)) if is_folder else name


def _split_of(folder: Path, key: str) -> Path:
    """The file of the split of `key` in a folder, or its folder in what `DatasetDict.save_to_disk` wrote."""
    files = sorted(path for path in folder.iterdir() if kind_of(path) is not None)
    names, wanted = {file: file.name.partition(".")[0].lower() for file in files}, SPLITS[key]
    if (folder / SAVED_DICT).is_file():
        files = [folder / split for split in _saved_splits(folder, key)]
        names = {file: file.name for file in files}
    found = [file for file in files if names[file] in {word + ending for word in wanted for ending in ENDINGS}]
    if len(found) == 1:
        return found[0]
    inside = (
        f"name one or several of those in it, e.g. {key}={(found or files)[0]}"
        if files
        else f"the folder has none of {', '.join(SUFFIXES)}"
    )
    many = f"several of them ({', '.join(file.name for file in found)})" if found else "none"
    raise ValueError(
        f"{key} must name files, or a folder with one file of its split ({' or '.join(wanted)}), got the folder "
        f"{str(folder)!r} with {many}; {inside}"
    )


def _saved_splits(folder: Path, key: str) -> list[str]:
    try:
        splits = json.loads((folder / SAVED_DICT).read_text(encoding="utf-8"))["splits"]
        if all(re.fullmatch(r"\w[\w.-]*", split) for split in splits):
            return list(splits)
    except (ValueError, TypeError, KeyError, RecursionError):  # no JSON, or of another form
        pass
    raise ValueError(f"{key}: {str(folder / SAVED_DICT)!r} must list the splits; save the dataset again")
