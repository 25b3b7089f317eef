# SPDX-License-Identifier: Apache-2.0
"""Datasets of the Hugging Face hub, references to images in a column of a table, and the bytes behind one.

    table:SOURCE#COLUMN[ROW][ITEM]     e.g. table:/data/train.parquet#images[12][0]

- SOURCE is a parquet file, a dataset of the hub (hf://...), or a folder that `Dataset.save_to_disk` wrote. ROW and ITEM
  begin at 0; ITEM counts the images of a row's list, and is 0 for a column without lists.
- A value is a file's bytes, or the hub's form of an image, {"bytes": ..., "path": ...}: its bytes, or where these are
  null the file at `path`, relative to the folder of the table.
- Only the row group that holds the row is read, and a process keeps the last `KEPT_GROUPS` of them.
"""

import os.path
import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from verl_digen.require import refusing

HUB = "hf://"
HUB_FORM = f"{HUB}OWNER/NAME[@REVISION][/CONFIG][:SPLIT]"
HUB_NAME = re.compile(
    r"hf://(?:datasets/)?(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w.-]+))?(?:/(?P<config>[\w.-]+))?"
    r"(?::(?P<split>\S+))?"
)


@dataclass(frozen=True)
class HubName:
    """A dataset of the hub. Downloads are kept in the cache of the `datasets` library, and its variables hold (HF_HOME,
    HF_TOKEN, HF_HUB_OFFLINE)."""

    name: str
    """OWNER/NAME."""
    revision: str | None
    """A branch, tag or commit; None is the newest."""
    config: str | None
    """The subset; None is the only or the default one."""
    split: str | None
    """A split or a slice of one, in the library's notation."""

    @staticmethod
    def parse(text: str, key: str) -> "HubName":
        """Read `HUB_FORM`; "datasets/" in front of the owner, as in the hub's own addresses, is ignored. ValueError for
        another form.

        Example:
            HubName.parse("hf://me/words/en:train[:100]", key)  # HubName("me/words", None, "en", "train[:100]")
        """
        match = HUB_NAME.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{key} must name a dataset of the hub by {HUB_FORM}, got {text!r}; write e.g. {key}=hf://owner/name:train"
            )
        return HubName(**match.groupdict())

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        config = f"/{self.config}" if self.config else ""
        return f"{HUB}{self.name}{revision}{config}" + (f":{self.split}" if self.split else "")

    def load(self) -> Any:
        """The dataset, downloaded if it is not in the cache. The library's errors pass."""
        import datasets  # 1 s, and users of files do not need it

        return datasets.load_dataset(self.name, self.config, split=self.split, revision=self.revision)


def load_saved(folder: str) -> Any:
    """The dataset that `Dataset.save_to_disk` wrote. The library's errors pass."""
    import datasets  # 1 s, and users of files do not need it

    return datasets.load_from_disk(folder)


TABLE = "table:"
TABLE_FORM = f"{TABLE}SOURCE#COLUMN[ROW][ITEM]"
TABLE_IMAGE = re.compile(r"table:(?P<source>.+)#(?P<column>[^#]+)\[(?P<row>\d+)\]\[(?P<item>\d+)\]")
PARQUET = ".parquet"
KEPT_GROUPS = 4
"""Row groups of an image column that a process keeps: some 100 images each, as the `datasets` library writes them."""
KEPT_DATASETS = 16
"""Datasets that a process keeps open; they are mapped into memory, not read."""


@dataclass(frozen=True)
class TableImage:
    """One image of a table."""

    source: str
    column: str
    row: int
    item: int = 0

    @staticmethod
    def parse(reference: str) -> "TableImage":
        """Inverse of `str`. Raises ValueError for another form."""
        match = TABLE_IMAGE.fullmatch(reference)
        if match is None:
            raise ValueError(
                f"an image of a table must be written {TABLE_FORM}, got {reference!r}; write the row and the item"
            )
        return TableImage(match["source"], match["column"], int(match["row"]), int(match["item"]))

    def __str__(self) -> str:
        return f"{TABLE}{self.source}#{self.column}[{self.row}][{self.item}]"

    def relative_to(self, folder: Path) -> "TableImage":
        """A copy whose source is absolute; a relative one lies in `folder`."""
        if self.source.startswith(HUB):
            return self
        return TableImage(str(folder / os.path.expanduser(self.source)), self.column, self.row, self.item)


def read_table_image(reference: str) -> bytes:
    """The bytes of the image file that `reference` names. ValueError for a malformed reference, a table that cannot be
    read, or no image at that place."""
    image = TableImage.parse(reference)
    rule = "an image of a prompt must be in a table that every node can read"
    with refusing(rule, reference, "put the table on shared storage, or remove its prompt"):
        value = _value(image)
    if isinstance(value, dict):
        value = _own_bytes(value, image)
    if not isinstance(value, bytes) or not value:
        raise ValueError(
            f"an image of a prompt must be the bytes of a picture file, but {reference!r} has "
            f"{'nothing' if not value else type(value).__name__}; fill it in, or remove its prompt"
        )
    return value


def _value(image: TableImage) -> Any:
    if image.source.lower().endswith(PARQUET):
        stat = os.stat(image.source)
        bounds = _group_bounds(image.source, stat.st_mtime_ns)
        group = bisect_right(bounds, image.row) - 1
        if group >= len(bounds) - 1:
            raise IndexError(f"it has {bounds[-1]} rows")
        cell = _group(image.source, stat.st_mtime_ns, group, image.column)[image.row - bounds[group]].as_py()
    else:
        table = _dataset(image.source)[image.row : image.row + 1]
        cell = table.column(image.column)[0].as_py()
    return cell[image.item] if isinstance(cell, list) else cell


def _own_bytes(value: dict[str, Any], image: TableImage) -> bytes | None:
    """Bytes of an image in the hub's form."""
    content, path = value.get("bytes"), value.get("path")
    if content is not None or not path:
        return content
    folder = Path(image.source).parent if image.source.lower().endswith(PARQUET) else Path(image.source)
    rule = f"{image} must name a file that every node can read, relative to {folder}"
    with refusing(rule, path, "put the file there, or its bytes into the table"):
        return (folder / os.path.expanduser(path)).read_bytes()


@lru_cache(maxsize=KEPT_DATASETS)
def _group_bounds(path: str, changed_ns: int) -> tuple[int, ...]:
    """First row of each row group, and the number of rows."""
    import pyarrow.parquet  # a heavy import that prompts without tables do not need

    metadata = pyarrow.parquet.read_metadata(path)
    return (0, *accumulate(metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)))


@lru_cache(maxsize=KEPT_GROUPS)
def _group(path: str, changed_ns: int, group: int, column: str) -> Any:
    """The column in one row group, as an Arrow array."""
    import pyarrow.parquet  # a heavy import that prompts without tables do not need

    with pyarrow.parquet.ParquetFile(path) as file:
        return file.read_row_group(group, columns=[column]).column(column)


@lru_cache(maxsize=KEPT_DATASETS)
def _dataset(source: str) -> Any:
    """The dataset, which gives tables of its rows as they are stored."""
    loaded = HubName.parse(source, "images").load() if source.startswith(HUB) else load_saved(source)
    return loaded.with_format("arrow")
