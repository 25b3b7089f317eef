# SPDX-License-Identifier: Apache-2.0
"""Prompt data as people have them: flow_grpo's folders, tables, compressed files, datasets of the hub."""

import gzip
import json
import logging
import random
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from verl_digen.data import splits, tables
from verl_digen.data.prompts import Columns, default_source, read_prompts
from verl_digen.data.splits import name_splits, resolve
from verl_digen.inputs.tables import HubName
from verl_digen.trainer import dataset

TRAIN, VAL = "data.train_files", "data.val_files"
GENEVAL = {"tag": "position", "include": [{"class": "cow", "count": 1, "position": ["left of", 0]}]}


def texts(files, key=TRAIN, **columns):
    return [prompt.text for prompt in read_prompts(str(files), key, Columns(**columns))]


def write(folder: Path, **files: str) -> Path:
    """A folder with files; "__" in a name stands for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return folder


def saved(folder: Path, **split_rows: list[dict]) -> Path:
    """A folder that `DatasetDict.save_to_disk` wrote."""
    import datasets

    data = {split: datasets.Dataset.from_list(rows) for split, rows in split_rows.items()}
    datasets.DatasetDict(**data).save_to_disk(str(folder))
    return folder


# -- folders -------------------------------------------------------------------------------------------------


def test_flow_grpos_folders_give_training_the_one_split_and_validation_the_other(tmp_path):
    ocr = write(tmp_path / "ocr", train__txt='A sign "Go"\n', test__txt='A sign "Stop"\n')
    rows = [json.dumps({"prompt": text, **GENEVAL}) for text in ("a cow", "two cows")]
    geneval = write(tmp_path / "geneval", train_metadata__jsonl=rows[0], test_metadata__jsonl=rows[1])
    train, val = read_prompts([str(ocr), str(geneval)], TRAIN), read_prompts([str(ocr), str(geneval)], VAL)
    assert [prompt.text for prompt in train] == ['A sign "Go"', "a cow"]
    assert [prompt.text for prompt in val] == ['A sign "Stop"', "two cows"]
    assert [(prompt.data_source, prompt.ground_truth) for prompt in train] == [("ocr", "Go"), ("geneval", "a cow")]
    assert val[1].extra == GENEVAL and val[0].place == f"line 1 of '{ocr / 'test.txt'}'"


@pytest.mark.parametrize(
    ("name", "key"),
    [
        *(("train.parquet", TRAIN), ("Train.JSONL", TRAIN), ("train.jsonl.gz", TRAIN), ("train_metadata.json", TRAIN)),
        *(("val.txt", VAL), ("validation.csv", VAL), ("test_metadata.jsonl", VAL)),
    ],
)
def test_a_folder_is_its_one_file_of_the_split(tmp_path, name, key):
    write(tmp_path, **{name: "", "notes.txt": "x", "training_notes.md": "x", "pretrain.txt": "x"})
    assert resolve(str(tmp_path), key) == [str(tmp_path / name)]


@pytest.mark.parametrize(
    ("files", "key", "told"),
    [
        (("train.txt", "train.jsonl"), TRAIN, "with several of them (train.jsonl, train.txt); name one or several of"),
        (("test.txt", "val.txt"), VAL, "(test or validation or val), got the folder"),
        (("train.txt",), VAL, "with none; name one or several of those in it, e.g. data.val_files="),
        (("README.md",), TRAIN, "with none; the folder has none of .parquet"),
    ],
)
def test_a_folder_without_exactly_one_file_of_the_split_is_refused(tmp_path, files, key, told):
    write(tmp_path, **dict.fromkeys(files, ""))
    with pytest.raises(ValueError) as failure:
        read_prompts(str(tmp_path), key)
    assert told in str(failure.value) and str(failure.value).startswith(f"{key} must name files, or a folder with one")


def test_one_folder_for_both_keys_gives_each_data_set_its_own_split(tmp_path):
    write(tmp_path / "ocr", train__txt="a", test__txt="b")
    data = {"train_files": f"{tmp_path}/ocr", "val_files": ["hf://me/words", f"{tmp_path}/ocr/test.txt"]}
    config = OmegaConf.create({"data": data})
    OmegaConf.set_struct(config, True)
    for _ in range(2):  # a second time changes nothing
        name_splits(config)
        assert config.data.train_files == [f"{tmp_path}/ocr/train.txt"]
        assert config.data.val_files == ["hf://me/words:test", f"{tmp_path}/ocr/test.txt"]
    none = OmegaConf.create({"data": {"train_files": f"{tmp_path}/ocr", "val_files": None}})
    name_splits(none)
    assert none.data.val_files is None


def test_repeated_prompts_are_counted_in_the_log(tmp_path, caplog):
    rows = [{"prompt": "a"}, {"prompt": "b"}, {"prompt": "a"}, {"prompt": "a", "ground_truth": "x"}, {"prompt": "a"}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level(logging.WARNING, logger=dataset.__name__):
        assert len(dataset.DiffusionPromptDataset(str(tmp_path / "p.jsonl"), max_samples=4)) == 4
        assert len(dataset.DiffusionPromptDataset(str(tmp_path / "p.jsonl"), max_samples=2)) == 2
    (message,) = caplog.messages
    assert message.startswith(f"1 of 4 prompts of {tmp_path}/p.jsonl repeat an earlier one")


# -- tables --------------------------------------------------------------------------------------------------

QUOTED_TABLE = b'\xef\xbb\xbfprompt,tag,ground_truth\r\n"A sign, ""Hi""\nand more",ocr,Hi\r\n,,\r\n\r\na cat,,\r\n'


def test_comma_separated_values_are_read_with_quotes_line_breaks_and_a_byte_order_mark(tmp_path):
    (tmp_path / "signs.csv").write_bytes(QUOTED_TABLE)
    sign, cat = read_prompts(str(tmp_path / "signs.csv"))
    assert (sign.text, sign.ground_truth, sign.extra) == ('A sign, "Hi"\nand more', "Hi", {"tag": "ocr"})
    assert (cat.text, cat.ground_truth, cat.extra, cat.data_source) == ("a cat", "a cat", {"tag": None}, "signs")
    assert (sign.place, cat.place) == (f"line 2 of '{tmp_path}/signs.csv'", f"line 6 of '{tmp_path}/signs.csv'")


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.tsv", "prompt\ttag\na cat, a dog\tx\n", ["a cat, a dog"]),
        ("a.tsv", 'prompt\nA sign "Hi" here\n', ['A sign "Hi" here']),  # a quote inside a text is a letter
        ("a.tsv", 'prompt\ttag\n"G O" on a wall\tx\na "cat\ty\n', ['"G O" on a wall', 'a "cat']),
        ("a.tsv", 'prompt\ttag\n"a\tx\ncat"\ty\n', ['"a', 'cat"']),
        ("a.tsv", 'prompt\ttag\n"a ""big"" cat"\tx\n', ['a "big" cat']),
        ("a.tsv", 'prompt\ttag\n"two\nlines"\tx\n', ["two\nlines"]),
        ("a.csv", "prompt,meta\na cat," + "x" * 200_000 + "\n", ["a cat"]),
        ("a.CSV", ",prompt\n0,a cat\n1,a dog\n", ["a cat", "a dog"]),  # the index that pandas writes
        ("a.csv", " prompt , tag \n a cat ,x\n", [" a cat "]),
        ("a.csv", "prompt\r007\r", ["007"]),
        ("a.csv", "prompt\na\u2028b\n", ["a\u2028b"]),
    ],
)
def test_tables_of_text_are_read_as_texts(tmp_path, name, content, found):
    (tmp_path / name).write_bytes(content.encode())
    prompts = read_prompts(str(tmp_path / name))
    assert [prompt.text for prompt in prompts] == found and all("" not in prompt.extra for prompt in prompts)


@pytest.mark.parametrize("name", ["p.jsonl.gz", "p.json.gz", "p.txt.gz", "p.csv.gz", "p.TSV.GZ"])
def test_compressed_files_are_read(tmp_path, name):
    kind = name.lower().split(".")[1]
    content = {"jsonl": '{"prompt": "a cat"}', "json": '[{"prompt": "a cat"}]', "txt": "a cat"}.get(
        kind, "prompt\na cat"
    )
    (tmp_path / name).write_bytes(gzip.compress(content.encode()))
    assert texts(tmp_path / name) == ["a cat"]
    assert default_source(tmp_path / "ocr" / "train.jsonl.gz") == "ocr" and default_source(tmp_path / name) == "p"


def test_columns_that_json_cannot_hold_are_left_out_with_a_warning(tmp_path, caplog):
    picture = {"bytes": b"png", "path": "a.png"}
    row = {"prompt": "a cat", "image": picture, "made": date(2026, 1, 1), "tags": ["x"], "at": {"x": 1.5}, "score": 2}
    pyarrow.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "p.parquet")
    with caplog.at_level(logging.WARNING, logger=tables.__name__):
        (prompt,) = read_prompts(str(tmp_path / "p.parquet"))
    assert prompt.extra == {"tags": ["x"], "at": {"x": 1.5}, "score": 2}
    (message,) = caplog.messages
    assert "image (struct" in message and "made (date32[day])" in message and "tags" not in message


def test_a_folder_named_as_a_partition_adds_and_hides_no_column(tmp_path):
    folder = tmp_path / "data_source=ocr" / "part=1"
    folder.mkdir(parents=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"prompt": "a", "data_source": "x"}]), folder / "p.parquet")
    (prompt,) = read_prompts(str(folder / "p.parquet"))
    assert (prompt.data_source, prompt.extra) == ("x", {})


def test_a_column_with_a_meaning_is_read_whatever_it_holds_and_its_own_rule_speaks(tmp_path):
    pyarrow.parquet.write_table(pa.Table.from_pylist([{"prompt": b"a cat"}]), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"must have a prompt that is a non-empty string or a chat .*, got b'a cat';"):
        read_prompts(str(tmp_path / "p.parquet"))


# -- columns -------------------------------------------------------------------------------------------------


def test_a_users_column_names_are_honoured_and_the_usual_ones_are_then_like_any_other(tmp_path):
    row = {"caption": "a cat", "task": "animals", "pictures": [], "prompt": "not this", "data_source": "nor this"}
    (tmp_path / "p.jsonl").write_text(json.dumps(row))
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"), TRAIN, Columns("caption", "task", "pictures"))
    assert (prompt.text, prompt.data_source, prompt.images) == ("a cat", "animals", ())
    assert prompt.extra == {"prompt": "not this", "data_source": "nor this"}
    (tmp_path / "p.txt").write_text("a dog\n")
    assert texts(tmp_path / "p.txt", prompt="caption") == ["a dog"]


def test_the_data_set_of_a_run_reads_the_columns_that_verls_keys_name(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"caption": "a cat", "task": "animals", "prompt": "not this"}')
    keys = {"prompt_key": "caption", "reward_fn_key": "task", "image_key": "images", "filter_overlong_prompts": False}
    (row,) = dataset.DiffusionPromptDataset(str(tmp_path / "p.jsonl"), config=OmegaConf.create(keys)).prompts
    assert (row.text, row.data_source, row.extra) == ("a cat", "animals", {"prompt": "not this"})


def test_a_missing_column_is_told_with_the_key_that_names_it(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"caption": "a cat"}')
    with pytest.raises(ValueError, match=r"a column 'text', got columns \['caption'\]; .* set data.prompt_key"):
        read_prompts(str(tmp_path / "p.jsonl"), TRAIN, Columns("text"))


@pytest.mark.parametrize(
    ("key", "name"),
    [("prompt_key", ""), ("prompt_key", 5), ("image_key", None), ("prompt_key", "images"), ("image_key", "extra_info")],
)
def test_column_names_without_sense_are_refused(key, name):
    names = {"prompt_key": "prompt", "reward_fn_key": "data_source", "image_key": "images"}
    assert Columns.of(OmegaConf.create(names)) == Columns()
    with pytest.raises(ValueError, match=rf"data\.{key} must be the name of a column without another meaning, got"):
        Columns.of(OmegaConf.create(names | {key: name}))


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"ground_truth": "CAT"}, "CAT"),
        ({"reward_model": {"ground_truth": "CAT"}}, "CAT"),
        ({"ground_truth": "CAT", "reward_model": {"ground_truth": "CAT"}}, "CAT"),
        ({"ground_truth": None, "reward_model": {"style": "rule"}}, "a cat"),
        ({"ground_truth": 0}, 0),
    ],
)
def test_the_reference_is_a_column_or_verls_mapping(tmp_path, row, truth):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a cat", **row}))
    (prompt,) = read_prompts(str(tmp_path / "p.jsonl"))
    assert prompt.ground_truth == truth and prompt.extra == {}


# -- the datasets library ------------------------------------------------------------------------------------


def test_saved_datasets_are_read_by_split_without_decoding_pictures(tmp_path):
    folder = saved(tmp_path / "words", train=[{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}], test=[{"prompt": "c"}])
    assert texts(folder) == ["a", "b"] and texts(folder, VAL) == ["c"]
    (first, second) = read_prompts(str(folder / "train"))
    assert (first.data_source, second.extra, second.place) == ("words", {"n": 2}, f"row 2 of '{folder}/train'")


def test_a_dataset_of_the_hub_is_read_by_name_and_split(tmp_path, monkeypatch):
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(tmp_path)  # the library looks for OWNER/NAME below the working directory before it asks the hub
    rows = "".join(json.dumps({"caption": f"cat {number}", "n": number}) + "\n" for number in range(5))
    write(tmp_path / "me" / "words", train__jsonl=rows, test__jsonl='{"caption": "a dog", "n": 7}\n')
    assert texts("hf://me/words", prompt="caption") == [f"cat {number}" for number in range(5)]
    assert texts("hf://me/words", VAL, prompt="caption") == ["a dog"]
    found = read_prompts("hf://datasets/me/words:train[2:4]", TRAIN, Columns("caption"))
    assert [(prompt.text, prompt.data_source, prompt.extra) for prompt in found] == [
        ("cat 2", "words", {"n": 2}),
        ("cat 3", "words", {"n": 3}),
    ]
    assert found[0].place == "row 1 of 'hf://me/words:train[2:4]'"
    with pytest.raises(ValueError, match=r"got 'hf://me/words:dev' \(.*Unknown split \"dev\".*; check its"):
        read_prompts("hf://me/words:dev")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("hf://me/words", HubName("me/words", None, None, None)),
        ("hf://me/words:train", HubName("me/words", None, None, "train")),
        ("hf://me/words/en:train[:1%]", HubName("me/words", None, "en", "train[:1%]")),
        ("hf://me/words@v1.0/en", HubName("me/words", "v1.0", "en", None)),
        ("hf://datasets/me/words", HubName("me/words", None, None, None)),
    ],
)
def test_names_of_the_hub_say_owner_name_revision_subset_and_split(text, name):
    assert HubName.parse(text, TRAIN) == name
    assert str(name) == text.replace("datasets/", "")


@pytest.mark.parametrize(
    ("typed", "names"),
    [
        ("hf://me/words", ["hf://me/words:train"]),
        ("hf://me/words@v1.0/en:dev", ["hf://me/words@v1.0/en:dev"]),
        ('"hf://me/words:dev[:100]"', ["hf://me/words:dev[:100]"]),
        ("[hf://me/words,a.txt]", ["hf://me/words:train", "a.txt"]),
    ],
)
def test_names_of_the_hub_can_be_typed_on_the_command_line(typed, names):
    (override,) = OverridesParser.create().parse_overrides([f"data.train_files={typed}"])
    config = OmegaConf.create({"files": override.value()})
    assert resolve(OmegaConf.to_container(config)["files"], TRAIN) == names  # type: ignore[index]


# -- malformed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", ["", "[]", '{"splits": 5}', '{"splits": ["../x"]}', '{"splits": [1]}', "[" * 9999])
def test_a_saved_dataset_that_does_not_list_its_splits_is_told(tmp_path, listed):
    write(tmp_path, **{splits.SAVED_DICT: listed})
    with pytest.raises(ValueError, match=r"data.train_files: .*dataset_dict.json' must list the splits; save the"):
        read_prompts(str(tmp_path))


def test_a_broken_saved_dataset_is_told(tmp_path):
    folder = saved(tmp_path / "words", train=[{"prompt": "a"}])
    next((folder / "train").glob("*.arrow")).write_bytes(b"junk")
    with pytest.raises(
        ValueError, match=r"data.train_files must name datasets that can be loaded, got '.*train' \(.*; save"
    ):
        read_prompts(str(folder))


SEEDS = {
    ".csv": b'prompt,tag\n"a ""cat""\n",x\n',
    ".tsv": b"prompt\ttag\na cat\tx\n",
    ".json": b'[{"prompt": "a cat", "extra_info": {"a": [1, null]}}]',
    ".jsonl": b'{"prompt": [{"role": "user", "content": "a"}]}\n"a"\n',
    ".txt": b"a cat\n",
    ".parquet": b"PAR1\x00\x01\x02PAR1",
}


@pytest.mark.parametrize("suffix", [*SEEDS, ".jsonl.gz", ".csv.gz"])
def test_random_bytes_are_read_or_are_an_error_of_one_line(tmp_path, suffix):
    rng = random.Random(suffix)
    seed = SEEDS[suffix.removesuffix(".gz")]
    num_refused = 0
    for number in range(120):
        content = bytearray(gzip.compress(seed, mtime=0) if suffix.endswith(".gz") else seed)
        for _ in range(rng.randint(1, 6)):
            place = rng.randrange(len(content) + 1)
            content[place : place + rng.randint(0, 2)] = rng.choice((rng.randbytes(2), b'"', b"\n", b",", b"\0", b"[{"))
        path = tmp_path / f"{number}{suffix}"
        path.write_bytes(rng.randbytes(rng.randrange(60)) if number % 4 == 0 else bytes(content))
        try:
            assert all(prompt.text.strip() for prompt in read_prompts(str(path)))
        except ValueError as error:
            num_refused += 1
            assert str(error).startswith("data.train_files") and "\n" not in str(error) and path.name in str(error)
    assert num_refused >= 20
