# SPDX-License-Identifier: Apache-2.0
"""Rows of datasets that the `datasets` library reads: those of the Hugging Face hub, and what `save_to_disk` wrote.

Downloads are kept in the library's cache, and its variables hold (HF_HOME, HF_TOKEN, HF_HUB_OFFLINE). Pictures are not
decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verl_digen.data.tables import rows_of_table

SCHEME = "hf://"
FORM = f"{SCHEME}OWNER/NAME[@REVISION][/CONFIG][:SPLIT]"
PATTERN = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?"
    r"(?::(?P<split>\S+))?"
)


@dataclass(frozen=True)
class HubName:
    """A dataset of the hub.

    Example:
        HubName.parse("hf://me/words/en:train[:100]", key)  # HubName("me/words", None, "en", "train[:100]")
    """

    name: str
    """OWNER/NAME."""
    revision: str | None
    """A branch, tag or commit; None is the newest."""
    config: str | None
    """The subset; None is the only or the default one."""
    split: str | None
    """A split or a slice of one, in the library's notation."""

    @staticmethod
    def parse(text: str, key: str) -> HubName:
        """Read `FORM`; "datasets/" in front of the owner, as in the hub's own addresses, may be left out.

        Raises:
            ValueError: another form.
        """
        match = PATTERN.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{key} must name a dataset of the hub by {FORM}, got {text!r}; write e.g. {key}=hf://owner/name:train"
            )
        return HubName(**match.groupdict())

    def with_split(self, default: str) -> HubName:
        """A copy with the split `default` where it has none."""
        return self if self.split else replace(self, split=default)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"/{self.config}" if self.config else ""
        return f"{SCHEME}{self.name}{revision}{config}" + (f":{self.split}" if self.split else "")


def hub_rows(name: HubName, key: str, kept: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a dataset of the hub.

    Args:
        kept: columns that are read whatever they hold, see `rows_of_table`.

    Raises:
        ValueError: it cannot be loaded.
    """

    def load() -> Any:
        import datasets  # 1 s, and users of files do not need it

        return datasets.load_dataset(name.name, name.config, split=name.split, revision=name.revision)

    return _rows(load, str(name), key, kept, "check its name, subset and split, and that this machine reaches the hub")


def saved_rows(folder: Path, key: str, kept: frozenset[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of what `Dataset.save_to_disk` wrote.

    Raises:
        ValueError: it cannot be loaded.
    """

    def load() -> Any:
        import datasets  # 1 s, and users of files do not need it

        return datasets.load_from_disk(str(folder))

    return _rows(load, str(folder), key, kept, "save the dataset again")


def _rows(load: Callable[[], Any], name: str, key: str, kept: frozenset[str], remedy: str) -> Iterator[Any]:
    try:
        table = load().with_format("arrow")[:]  # as it is stored: nothing is decoded
    except Exception as error:  # the library raises what its loaders, file systems and the network do
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ValueError(f"{key}: {name!r} is not a dataset that can be loaded ({reason}); {remedy}") from error
    return rows_of_table(table, name, kept)
