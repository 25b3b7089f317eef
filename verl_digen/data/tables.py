# SPDX-License-Identifier: Apache-2.0
"""Rows of tables: parquet, what the `datasets` library reads, and comma- or tab-separated values.

- Images are references: no image's bytes stay in memory. A column holds images if it has bytes, the hub's form
  {"bytes": ..., "path": ...}, or lists of either. Of a parquet file in the hub's form only the paths are read; a column
  of bytes alone is read a few rows at a time.
- Another column that a prompt's row cannot hold (bytes, pictures, dates, decimals) is left out with a warning. A prompt
  is part of checkpoints as JSON, and travels to every reward.

Invariant (tests/data/test_image_columns.py): every reference leads to the bytes that the table has at that place.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_digen.inputs.tables import TableImage
from verl_digen.require import refusing, require

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 64
"""Rows of a column of bytes that are in memory while its empty ones are looked for."""

References = list[str] | None
"""References to the images of one row; None: the row has none."""


def holds_images(kind: pyarrow.DataType) -> bool:
    """True for the type of a column that holds images, not paths."""
    from pyarrow import types

    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return holds_images(kind.value_type)
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)
    return is_bytes or types.is_struct(kind)


def require_form(kind: pyarrow.DataType, where: str) -> None:
    """Require the hub's fields in a column of structs, or lists of them. Raises ValueError for others."""
    from pyarrow import types

    if types.is_nested(kind) and not types.is_struct(kind):
        return require_form(kind.field(0).type, where)
    names = [field.name for field in kind] if types.is_struct(kind) else ["bytes"]
    require(
        not {"bytes", "path"}.isdisjoint(names),
        f"{where} must have images as the fields bytes and path, as the hub has them, or as paths",
        names,
        "rename the fields",
    )


def table_references(column: Iterable[pyarrow.Array], source: str, name: str) -> list[References]:
    """References of all rows of a column, given by its chunks: of images, or of a part of each that is there where the
    image is."""
    found: list[References] = []
    for chunk in column:
        for number in _numbers(chunk):
            row = len(found)
            found.append(None if number is None else [str(TableImage(source, name, row, at)) for at in range(number)])
    return found


def parquet_references(file: pyarrow.parquet.ParquetFile, path: Path, name: str) -> list[References]:
    """References of all rows of a column of a parquet file; see the module for what is read."""
    everything = (file.schema.column(number).path for number in range(len(file.schema)))
    leaves = [path for path in everything if f"{path}.".startswith(f"{name}.")]
    cheap = [leaf for leaf in leaves if leaf.rpartition(".")[2] == "path"] or leaves[:1]
    batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=cheap)
    return table_references((batch.column(0) for batch in batches), str(path.absolute()), name)


def _numbers(chunk: pyarrow.Array) -> Iterator[int | None]:
    """Number of images of each row; None for a row without a value."""
    from pyarrow import compute, types

    kind = chunk.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return iter(compute.call_function("list_value_length", [chunk]).to_pylist())
    return (1 if valid else None for valid in chunk.is_valid().to_pylist())


def parquet_rows(
    path: Path, key: str, kept: frozenset[str], images: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row of a parquet file; see `rows_of_table`. Raises ValueError if it is not readable."""
    import pyarrow.lib  # a heavy import that text users do not need
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            pictured = _of_images(file.schema_arrow, images, f"{key}: ", str(path))
            found = {name: parquet_references(file, path, name) for name in pictured}
            table = file.read([name for name in file.schema_arrow.names if name not in found])
        return rows_of_table(table, str(path), kept, found)
    except (OSError, pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{key}: {str(path)!r} is not a readable parquet file ({reason}); write it again") from error


def rows_of_table(
    table: pyarrow.Table, name: str, kept: frozenset[str], found: Mapping[str, Sequence[References]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row of an Arrow table of this `name` (of a file or dataset). `kept`: columns that are read
    whatever they hold; their own rules say what is wrong; `found`: references of the columns with images, which the
    table is without."""
    columns = [one.name for one in table.schema if one.name in kept or _is_plain(one.type)]
    left_out = [f"{one.name} ({one.type})" for one in table.schema if one.name not in columns]
    if left_out:
        logger.warning(
            "%r: columns of bytes, pictures, dates and decimals are not read: %s; convert those that a reward needs to "
            "texts or numbers, and set data.image_key to the name of the images that prompts are about",
            name,
            ", ".join(left_out),
        )
    rows = table.select(columns).to_pylist()
    for column, references in found.items():
        rows = [{**row, column: own} for row, own in zip(rows, references, strict=True)]
    return ((f"row {number}", row) for number, row in enumerate(rows, start=1))


def _of_images(schema: pyarrow.Schema, images: Sequence[str], key: str, place: str) -> list[str]:
    """The columns `images` that hold images. ValueError, which begins with `key`, if one has another form."""
    found = [name for name in images if name in schema.names and holds_images(schema.field(name).type)]
    for name in found:
        require_form(schema.field(name).type, f"{key}{name} of {place!r}")
    return found


def dataset_rows(
    load: Callable[[], Any], name: str, typed: str, key: str, kept: frozenset[str], images: Sequence[str], remedy: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of a dataset of the `datasets` library, `typed` in places; pictures are not decoded. See
    `rows_of_table`. ValueError: it cannot be loaded."""
    with refusing(f"{key} must name datasets that can be loaded", name, remedy):
        table = load().with_format("arrow")[:]  # as it is stored: nothing is decoded
    pictured = _of_images(table.schema, images, "", name)
    found = {column: table_references(table.column(column).chunks, name, column) for column in pictured}
    rows = rows_of_table(table.drop_columns(pictured), name, kept, found)
    return ((f"{place} of {typed!r}", row) for place, row in rows)


def csv_rows(text: str, delimiter: str, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of every row that has a non-empty cell, below a header row, with quotes as RFC 4180 has them; texts
    only. An empty cell is a missing value; a column without a name (an index, as pandas writes it) is left out.
    Tab-separated values whose quotes are not in pairs on each line have none: there they are letters. ValueError: a
    header without names or with one twice; a row with another number of cells; stray quotes."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    quoting = csv.QUOTE_NONE if delimiter == "\t" and _has_letters_for_quotes(text) else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, quoting=quoting)
    header: list[str] = []
    start = 1
    try:
        for cells in reader:
            place, start = f"line {start}", reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = _header(cells, where, place)
            elif len(cells) != len(header):
                raise ValueError(
                    f"{where} must have {len(header)} cells in {place}, as its header has, got {len(cells)}; put "
                    f"quotes around a text with {'commas' if delimiter == ',' else 'tabs'}"
                )
            else:
                yield place, {name: cell or None for name, cell in zip(header, cells, strict=True) if name}
    except csv.Error as error:
        raise ValueError(
            f"{where} must be comma- or tab-separated values with quotes in pairs, but line {start} is not ({error}); "
            'put quotes around a text that begins with one, and write "" for a quote in it'
        ) from error


def _has_letters_for_quotes(text: str) -> bool:
    """True for tab-separated lines of equally many cells, the quotes of one of which are not in pairs."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len({line.count("\t") for line in lines}) != 1:
        return False
    try:
        for line in lines:
            next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error:
        return True
    return False


def _header(cells: list[str], where: str, place: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    twice = sorted({name for name in names if name and names.count(name) > 1})
    if twice:
        raise ValueError(
            f"{where} must have columns with names of their own in {place}, got {', '.join(twice)} twice; rename one"
        )
    return names


def _is_plain(kind: pyarrow.DataType) -> bool:
    """True if JSON has the type's values."""
    from pyarrow import types

    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _is_plain(kind.value_type)
    if types.is_nested(kind):
        return not types.is_union(kind) and all(_is_plain(kind.field(i).type) for i in range(kind.num_fields))
    texts = types.is_string, types.is_large_string, types.is_string_view
    numbers = types.is_boolean, types.is_integer, types.is_floating
    return any(is_kind(kind) for is_kind in (types.is_null, *numbers, *texts))
