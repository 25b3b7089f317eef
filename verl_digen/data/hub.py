# SPDX-License-Identifier: Apache-2.0
"""Rows of datasets that the `datasets` library reads: from the Hugging Face hub, and from `save_to_disk` folders.

Pictures are not decoded: a row has references to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from verl_digen.data.tables import rows_of_table
from verl_digen.hub import HubName, load_saved


def hub_rows(
    name: HubName, key: str, kept: frozenset[str], images: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a dataset of the hub.

    Args:
        kept, images: see `rows_of_table`.

    Raises:
        ValueError: it cannot be loaded.
    """
    remedy = "check its name, subset and split, and that this machine reaches the hub"
    return _rows(name.load, str(name), key, kept, images, remedy)


def saved_rows(
    folder: Path, key: str, kept: frozenset[str], images: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of what `Dataset.save_to_disk` wrote.

    Raises:
        ValueError: it cannot be loaded.
    """
    place = str(folder.absolute())
    return _rows(partial(load_saved, place), place, key, kept, images, "save the dataset again")


def _rows(
    load: Callable[[], Any], name: str, key: str, kept: frozenset[str], images: Sequence[str], remedy: str
) -> Iterator[Any]:
    try:
        table = load().with_format("arrow")[:]  # as it is stored: nothing is decoded
    except Exception as error:  # the library raises what its loaders, file systems and the network do
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{key}: {name!r} is not a dataset that can be loaded ({reason}); {remedy}") from error
    return rows_of_table(table, name, kept, images=images)
