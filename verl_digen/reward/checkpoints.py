# SPDX-License-Identifier: Apache-2.0
"""Weights of reward models: a path, or a repository of the Hugging Face hub, fetched once per machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def folder(name: str, key: str, files: Sequence[str] | None = None) -> Path:
    """The folder of a checkpoint.

    Args:
        name: a folder, or "owner/repository" of the hub, "owner/repository@revision" for one revision.
        key: what the user typed it under, for the message.
        files: patterns of the files that are needed; None fetches all.

    Raises:
        ValueError: no such folder, and the hub does not answer or has no such repository.
    """
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


def file(name: str, filename: str, key: str) -> Path:
    """One file of weights: `name` itself if it is a file, else `filename` in the folder or repository `name`.

    Raises:
        ValueError: there is no such file, or the hub does not answer.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    found = folder(name, key, [filename]) / filename
    if not found.is_file():
        raise ValueError(f"{key} must hold {filename}, got {name!r} without it; fetch it, or name it")
    return found
