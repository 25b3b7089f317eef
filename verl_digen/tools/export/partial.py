# SPDX-License-Identifier: Apache-2.0
"""A folder that appears when everything is in it.

Invariant (tests/export/test_export.py): a body that raises leaves nothing behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_digen.require import require

PARTIAL = ".partial"
"""Suffix of a folder that is being written."""


def require_empty(folder: Path) -> None:
    """Raise ValueError unless `folder` is missing or empty, and no other command is writing it."""
    is_free = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    require(is_free, "--output must be a new or an empty folder", str(folder), "name another one")
    partial = partial_of(folder)
    require(
        not partial.exists(),
        f"{str(partial)!r} must not be there: another command writes it, or was killed",
        "a folder",
        "remove it, or give another --output",
    )


def partial_of(folder: Path) -> Path:
    """The folder in which the content of `folder` is collected."""
    return folder.with_name(folder.name + PARTIAL)


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write to, renamed to `folder` at the end, or removed if the body raised.

    Raises:
        ValueError: see `require_empty`.
    """
    folder = folder.absolute()
    require_empty(folder)
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
