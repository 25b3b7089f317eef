# SPDX-License-Identifier: Apache-2.0
"""Local folder of the checkpoint at `actor_rollout_ref.model.path`, and its JSON files.

A local folder is used in place, an hdfs:// address is copied by verl, and anything else of the form ORG/NAME is a
repository of the Hugging Face hub, downloaded into the hub's cache once per node. Only parts that the pipeline's index
names are downloaded: repositories often hold the same weights again, in one file or in fp16.
"""

import json
import re
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from verl_digen.require import refusing


def read_object(file: Path, key: str) -> dict[str, Any]:
    """Read the object in a JSON file. `key`: config key of the file's folder, e.g. "actor_rollout_ref.model.path".
    ValueError if the file cannot be read, is not JSON, or holds something other than an object."""
    with refusing(f"{key} must hold a readable {file.name}", str(file), "complete the download"):
        value = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(
            f"{key} must hold a {file.name} with a JSON object, got a {type(value).__name__} in {str(file)!r}; "
            "complete the download"
        )
    return value


HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")

INDEX = "model_index.json"
NEEDED_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
"""Patterns of the files that a part of a pipeline needs; leaves out pictures and other formats."""
CONFIG_FILES = (
    *("config.json", "guider_config.json", "scheduler_config.json", "tokenizer_config.json"),
    "preprocessor_config.json",
)
"""Files that are read without a part's weights; every part has one of them."""
SAMPLE_BYTES = 65536
"""Read at the start, in the middle and at the end of a file for a fingerprint."""
VARIANTS = ["*.fp16*"]
"""Patterns of duplicate weights, which are not read."""


def locate(path: str, *, use_shm: bool = False) -> Path:
    """Local folder of the checkpoint at `path`, downloaded if necessary. ValueError if it is neither a folder nor a
    repository that the hub or its cache has."""
    if not _is_on_hub(path):
        from verl.utils.fs import copy_to_local  # verl is not needed to read a local checkpoint

        return Path(copy_to_local(path, use_shm=use_shm))
    return _fetch(path, NEEDED_FILES)


def locate_index(path: str) -> Path:
    """Local folder with `model_index.json`, without fetching anything else. Raises as `locate`."""
    if not _is_on_hub(path):
        return Path(path).expanduser()
    from huggingface_hub import hf_hub_download

    return Path(_from_hub(path, lambda: hf_hub_download(path, INDEX))).parent


def locate_configs(path: str) -> Path:
    """Local folder with the index and every part's config, without fetching any weights. Raises as `locate`."""
    return _fetch(path, CONFIG_FILES) if _is_on_hub(path) else Path(path).expanduser()


def fingerprint(path: str | None) -> str | None:
    """Hash of the networks that train in a checkpoint's folder, or of an adapter's folder: names, sizes and parts of
    their files. None where `path` is no folder of this machine."""
    folder, found = Path(path or "").expanduser(), sha256()
    if path is None or not folder.is_dir():
        return None
    for file in sorted(folder.glob("transformer*/*")) or sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".bin") and file.is_file():
            size = file.stat().st_size
            found.update(f"{file.relative_to(folder)} {size}\n".encode())
            with open(file, "rb") as content:
                for place in (0, size // 2, size - SAMPLE_BYTES):
                    content.seek(max(0, place))
                    found.update(content.read(SAMPLE_BYTES))
    return found.hexdigest()


def _fetch(path: str, files: tuple[str, ...]) -> Path:
    """Fetch `files` of every part that the repository's index names."""
    from huggingface_hub import snapshot_download

    index = read_object(locate_index(path) / INDEX, "actor_rollout_ref.model.path")
    parts = [name for name, entry in index.items() if isinstance(entry, list) and entry[0] is not None]
    wanted = [INDEX, *(f"{part}/{file}" for part in parts for file in files)]
    return Path(_from_hub(path, lambda: snapshot_download(path, allow_patterns=wanted, ignore_patterns=VARIANTS)))


def _is_on_hub(path: str) -> bool:
    return HUB_ID.fullmatch(path) is not None and not Path(path).exists()


def _from_hub(path: str, fetch: Callable[[], str]) -> str:
    try:
        return fetch()
    except Exception as error:  # the hub's client raises many kinds; each is reported in one line
        raise ValueError(
            "actor_rollout_ref.model.path must be a folder with a diffusers checkpoint or a repository of the hub, "
            f"got {path!r}, which is no folder here and could not be fetched ({type(error).__name__}); check the name, "
            "the network and the access token (HF_TOKEN), or download it first and give the folder"
        ) from error
