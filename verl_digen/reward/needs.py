# SPDX-License-Identifier: Apache-2.0
"""Packages and weights that a reward needs. Packages are looked for before a run starts, and imported when the reward
is made."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType


def imported(module: str, needed_by: str) -> ModuleType:
    """Import an optional package. `needed_by`: name of the reward, for the message. ValueError if it is not installed,
    or cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]
        state = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ValueError(_told(module, needed_by, state)) from error


def require_installed(modules: Iterable[str], needed_by: str) -> None:
    """Raise ValueError unless the packages are installed; imports none of them."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ValueError(_told(module, needed_by, "is not installed"))


def _told(module: str, needed_by: str, state: str) -> str:
    package = module.partition(".")[0]
    return f"reward {needed_by} needs the package {package}, which {state}; pip install 'verl-digen[rewards]'"


def checkpoint_folder(name: str, key: str, files: Sequence[str] | None = None) -> Path:
    """The folder of a checkpoint, which is fetched once per machine. `name` is a folder, or "owner/repository" of the
    hub, "owner/repository@revision" for one revision; `files` are patterns of the files that are needed, None fetches
    all. ValueError, naming `key`, if there is no such folder, and the hub does not answer or has no such repository."""
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition("@")
    patterns = None if files is None else list(files)
    try:
        return Path(snapshot_download(repository, revision=revision or None, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors, a malformed name is a ValueError
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{key} must name a folder or a repository of the hub that can be fetched, got {name!r} ({line}); check "
            "the name and the network, or fetch it elsewhere and give its path"
        ) from error


def checkpoint_file(name: str, filename: str, key: str) -> Path:
    """One file of weights: `name` itself if it is a file, else `filename` in the folder or repository `name`.
    ValueError if there is no such file, or the hub does not answer."""
    path = Path(name).expanduser()
    if path.is_file():
        return path
    found = checkpoint_folder(name, key, [filename]) / filename
    if not found.is_file():
        raise ValueError(f"{key} must hold {filename}, got {name!r} without it; fetch it, or name it")
    return found
