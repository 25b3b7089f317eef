# SPDX-License-Identifier: Apache-2.0
"""Images in tables: each form to references, and these back to the bytes."""

import io
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from verl_digen.data.prompts import Columns, read_prompts
from verl_digen.data.tables import parquet_references
from verl_digen.inputs import tables as image_tables
from verl_digen.inputs.images import MAX_PIXELS, read_images, source_image
from verl_digen.inputs.tables import HubName

COLOURS = ["red", "green", "blue", "white", "black"]


def png(colour: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), colour).save(buffer, format="PNG")
    return buffer.getvalue()


HUB = pa.struct({"bytes": pa.binary(), "path": pa.string()})
FORMS = {
    "the hub's form": (HUB, lambda colour: {"bytes": png(colour), "path": f"{colour}.png"}),
    "lists of the hub's form": (pa.list_(HUB), lambda colour: [{"bytes": png(colour), "path": None}] * 2),
    "bytes": (pa.binary(), png),
    "lists of bytes": (pa.list_(pa.binary()), lambda colour: [png("red"), png(colour)]),
    "files": (HUB, lambda colour: {"bytes": None, "path": f"pictures/{colour}.png"}),
}


def write(path: Path, form: str) -> Path:
    """A parquet file of one prompt per colour, the third of which has no image; two rows a group."""
    kind, value = FORMS[form]
    images = [None if number == 2 else value(colour) for number, colour in enumerate(COLOURS)]
    table = pa.table({"prompt": [f"a {colour} sky" for colour in COLOURS], "source": pa.array(images, kind)})
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    (path.parent / "pictures").mkdir(exist_ok=True)
    for colour in COLOURS:
        (path.parent / "pictures" / f"{colour}.png").write_bytes(png(colour))
    return path


def colours(references) -> list[str]:
    """Names of the colours of images."""
    names = {Image.new("RGB", (1, 1), name).getpixel((0, 0)): name for name in COLOURS}
    return [names[source_image(reference).read().getpixel((0, 0))] for reference in references]


@pytest.mark.parametrize("form", FORMS)
def test_a_parquet_files_images_are_references_to_them(form, tmp_path, caplog):
    path = write(tmp_path / "train.parquet", form)
    with caplog.at_level(logging.WARNING):
        rows = read_prompts(str(path), columns=Columns(images="source"))
    assert not caplog.records
    assert rows[2].images == ()
    for number, colour in enumerate(COLOURS):
        if number != 2:
            assert colours(rows[number].images)[-1] == colour
            assert all(one.startswith(f"table:{path}#source[{number}][") for one in rows[number].images)
            assert len(rows[number].images) == (2 if form.startswith("lists") else 1)
    assert json.loads(json.dumps(rows[0].images)) == list(rows[0].images), "a row is part of checkpoints"


@pytest.mark.parametrize(
    ("form", "read"),
    [("the hub's form", "source.path"), ("lists of the hub's form", "source.list.element.path"), ("bytes", "source")],
)
def test_images_are_counted_without_their_bytes_where_they_have_paths(form, read, tmp_path):
    kind, value = FORMS[form]
    table = pa.table({"source": pa.array([value("red")], kind), "source_b": pa.array([FORMS["files"][1]("red")], HUB)})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    file, columns = pyarrow.parquet.ParquetFile(tmp_path / "t.parquet"), []

    def iter_batches(**how):
        columns.extend(how["columns"])
        return file.iter_batches(**how)

    watched = cast(Any, SimpleNamespace(schema=file.schema, iter_batches=iter_batches))
    (references,) = parquet_references(watched, tmp_path / "t.parquet", "source")
    assert columns == [read] and references is not None and len(references) == (2 if form.startswith("lists") else 1)


@pytest.mark.parametrize("form", ["the hub's form", "bytes"])
def test_pairs_of_a_table_are_references_too(form, tmp_path):
    kind, value = FORMS[form]
    columns = {
        name: pa.array([value(colour) for colour in pair], kind)
        for name, pair in (("images", ("red", "red")), ("rejected", ("black", "white")), ("chosen", ("green", "red")))
    }
    pyarrow.parquet.write_table(pa.table({"prompt": ["a", "b"], **columns}), tmp_path / "pairs.parquet")
    rows = read_prompts(str(tmp_path / "pairs.parquet"))
    assert [colours(row.pair) for row in rows] == [["green", "black"], ["red", "white"]]
    assert [colours(row.images) for row in rows] == [["red"], ["red"]]


@pytest.mark.parametrize("form", ["the hub's form", "lists of bytes"])
def test_a_saved_datasets_images_are_references_to_them(form, tmp_path):
    import datasets

    written = datasets.Dataset.from_parquet(str(write(tmp_path / "train.parquet", form)), cache_dir=str(tmp_path / "c"))
    written.save_to_disk(str(tmp_path / "saved"))
    rows = read_prompts(str(tmp_path / "saved"), columns=Columns(images="source"))
    assert [colours(row.images)[-1:] for row in rows] == [["red"], ["green"], [], ["white"], ["black"]]
    assert rows[1].images[0] == f"table:{tmp_path / 'saved'}#source[1][0]"


def test_a_hub_datasets_images_are_references_by_its_name(tmp_path, monkeypatch):
    import datasets

    written = datasets.Dataset.from_parquet(
        str(write(tmp_path / "t.parquet", "the hub's form")), cache_dir=str(tmp_path)
    )
    loaded = []
    monkeypatch.setattr(HubName, "load", lambda self: loaded.append(str(self)) or written)
    image_tables._dataset.cache_clear()
    rows = read_prompts("hf://me/edits:train[:5]", columns=Columns(images="source"))
    assert rows[4].images == ("table:hf://me/edits:train[:5]#source[4][0]",)
    assert colours(rows[4].images) == ["black"]
    assert loaded == ["hf://me/edits:train[:5]"] * 2
    image_tables._dataset.cache_clear()


def test_a_row_may_name_an_image_of_a_table(tmp_path):
    write(tmp_path / "images.parquet", "bytes")
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "images": "table:images.parquet#source[4][0]"}))
    (row,) = read_prompts(str(tmp_path / "train.jsonl"))
    assert colours(row.images) == ["black"]
    for given, told in (
        ("table:images.parquet#source[4]", r"line 1 of .* must be written table:SOURCE#COLUMN\[ROW\]\[ITEM\], got"),
        ("table:gone.parquet#source[4][0]", r"must have images that are files, but '.*gone.parquet' is missing"),
    ):
        (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "a", "images": given}))
        with pytest.raises(ValueError, match=told):
            read_prompts(str(tmp_path / "train.jsonl"))


def test_what_cannot_be_read_of_a_table_names_the_place(tmp_path):
    path = write(tmp_path / "train.parquet", "files")
    for reference, told in (
        (f"table:{path}#source[5][0]", "[5][0]' (IndexError: it has 5 rows); put the table on shared storage"),
        (f"table:{path}#other[0][0]", "must be in a table that every node can read, got"),
        (f"table:{path}#source[2][0]", "has nothing; fill it in, or remove its prompt"),
        (f"table:{tmp_path}/gone.parquet#source[0][0]", "(FileNotFoundError"),
    ):
        with pytest.raises(ValueError) as caught:
            source_image(reference)
        assert told in str(caught.value) and reference in str(caught.value)
    (tmp_path / "pictures" / "green.png").unlink()
    with pytest.raises(ValueError, match=r"source\[1\]\[0\] must .*, relative to .*, got 'pictures/green.png' \(File"):
        source_image(f"table:{path}#source[1][0]")


def test_a_table_that_is_written_anew_during_a_run_is_an_error(tmp_path):
    path = write(tmp_path / "train.parquet", "bytes")
    known = source_image(f"table:{path}#source[0][0]")
    assert known.read().size == (6, 4)
    table = pa.table({"prompt": ["a"], "source": pa.array([png("blue")], pa.binary())})
    pyarrow.parquet.write_table(table, path)
    with pytest.raises(ValueError, match=r"must stay as it is during a run, but 'table:.*' has changed"):
        known.read()


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_is_as_large_as_it_is_shown_and_not_too_large(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    Image.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    found = source_image(str(tmp_path / "turned.jpg"))
    assert (found.width_px, found.height_px) == (4, 6) == found.read().size
    Image.new("1", (10_001, 10_000)).save(tmp_path / "large.png")
    with pytest.raises(ValueError, match=rf"at most {MAX_PIXELS} pixels, but '.*large.png' has 10001 x 10000; make"):
        source_image(str(tmp_path / "large.png"))


@pytest.mark.parametrize("kind", ["struct", "list"])
def test_images_in_other_fields_than_the_hubs_are_refused_when_they_are_read(tmp_path, kind):
    other = {"image": "a.png"} if kind == "struct" else [{"image": "a.png"}]
    pyarrow.parquet.write_table(pa.table({"prompt": ["a"], "images": [other]}), tmp_path / "a.parquet")
    rule = r"data.train_files: images of .*a.parquet' must have images as the fields bytes and path, .* got \['image'\]"
    with pytest.raises(ValueError, match=rule):
        read_prompts(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize("given", ["https://host/a.png", "file:///a.png", "data:image/png;base64," + "A" * 4000])
def test_an_image_is_a_file_and_no_address(tmp_path, given):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "images": [given]}))
    with pytest.raises(
        ValueError, match=r"must have images that are files, got .*; write the pictures to files"
    ) as told:
        read_prompts(str(tmp_path / "a.jsonl"))
    assert len(str(told.value)) < 400


RAMP = np.tile(np.linspace(0, 1, 64, dtype=np.float32), (64, 1))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("a.png", np.round(RAMP * 65535).astype(np.uint16)),
        ("a.tif", np.round(RAMP * 65535).astype(np.uint16)),
        ("b.tif", np.round(RAMP * 65535).astype(np.int32)),
        ("c.tif", np.round(RAMP * 255).astype(np.int32)),
        ("d.tif", RAMP),
    ],
)
def test_grey_values_of_more_than_8_bits_are_scaled(tmp_path, name, values):
    Image.fromarray(values).save(tmp_path / name)
    (picture,) = read_images([str(tmp_path / name)])
    assert np.abs(np.asarray(picture) - RAMP[..., None] * 255).max() <= 1


@pytest.mark.parametrize("values", [RAMP * 255, RAMP - 1, np.full((4, 4), np.nan, np.float32)])
def test_floats_of_another_range_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "a.tif")
    with pytest.raises(ValueError, match=r"its grey values must lie in \[0, 1\], got"):
        read_images([str(tmp_path / "a.tif")])
