# SPDX-License-Identifier: Apache-2.0
"""Columns of images in tables, as references: no image's bytes stay in memory.

A column holds images if it has bytes, the hub's form {"bytes": ..., "path": ...}, or lists of either. Of a parquet file
in the hub's form only the paths are read; a column of bytes alone is read a few rows at a time.

Invariant (tests/data/test_image_columns.py): every reference leads to the bytes that the table has at that place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl_digen.inputs.tables import TableImage
from verl_digen.require import require

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

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
    """Require the hub's fields in a column of structs, or lists of them.

    Raises:
        ValueError: others.
    """
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
    """References of all rows of a column.

    Args:
        column: its chunks, of images or of a part of each that is there where the image is.
        source, name: table and column.
    """
    found: list[References] = []
    for chunk in column:
        for number in _numbers(chunk):
            row = len(found)
            found.append(None if number is None else [str(TableImage(source, name, row, at)) for at in range(number)])
    return found


def parquet_references(file: pyarrow.parquet.ParquetFile, path: Path, name: str) -> list[References]:
    """References of all rows of a column of a parquet file; see the module for what is read."""
    leaves = [leaf.path for leaf in map(file.schema.column, range(len(file.schema))) if _is_in(leaf.path, name)]
    cheap = [leaf for leaf in leaves if leaf.rpartition(".")[2] == "path"] or leaves[:1]
    batches = file.iter_batches(batch_size=ROWS_AT_ONCE, columns=cheap)
    return table_references((batch.column(0) for batch in batches), str(path.absolute()), name)


def _is_in(leaf: str, name: str) -> bool:
    return leaf == name or leaf.startswith(f"{name}.")


def _numbers(chunk: pyarrow.Array) -> Iterator[int | None]:
    """Number of images of each row; None for a row without a value."""
    from pyarrow import compute, types

    kind = chunk.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return iter(compute.call_function("list_value_length", [chunk]).to_pylist())
    return (1 if valid else None for valid in chunk.is_valid().to_pylist())
