# SPDX-License-Identifier: Apache-2.0
import gzip
import json
import logging

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_digen.data.prompts import (
    count_repeated,
    default_ground_truth,
    default_source,
    describe_dropped,
    find_too_long,
    read_prompts,
    without,
)
from verl_digen.data.rows import loop_columns, loop_row, prompt_batch, prompt_rows
from verl_digen.trainer import dataset as dataset_module
from verl_digen.trainer.dataset import DiffusionPromptDataset
from verl_digen.types import PromptRow


def test_parquet_as_verl_users_write_it_is_read(tmp_path):
    rows = [
        {
            "prompt": [{"role": "system", "content": "draw"}, {"role": "user", "content": "a cat"}],
            "negative_prompt": [{"role": "user", "content": "blurry"}],
            "data_source": "ocr",
            "reward_model": {"style": "rule", "ground_truth": "CAT"},
            "extra_info": {"split": "train"},
            "ability": "ocr",
        },
        {"prompt": [{"role": "user", "content": "a dog"}], "data_source": None, "reward_model": None},
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "animals.parquet")
    first, second = read_prompts(str(tmp_path / "animals.parquet"))
    assert first == PromptRow("a cat", "ocr", "CAT", "blurry", {"split": "train", "ability": "ocr"})
    assert second == PromptRow("a dog", "animals", "a dog", None, {"ability": None})


def test_jsonl_and_text_files_are_read_in_order_with_defaults(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a dog", "negative_prompt": "blurry"}) + "\n\n")
    (tmp_path / "b.txt").write_text("a bird\n\n  a fish  \n")
    prompts = read_prompts([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    assert [prompt.text for prompt in prompts] == ["a dog", "a bird", "a fish"]
    assert prompts[0].negative == "blurry" and prompts[0].data_source == "a"
    assert prompts[1].ground_truth == "a bird" and prompts[1].data_source == "b"
    assert prompts[2].place == f"line 3 of '{tmp_path / 'b.txt'}'"


def test_a_rows_own_extra_info_wins_over_a_column_of_the_same_name(tmp_path):
    row = {"prompt": "a", "tag": "column", "other": 1, "extra_info": {"tag": "own"}}
    (tmp_path / "x.jsonl").write_text(json.dumps(row))
    assert read_prompts(str(tmp_path / "x.jsonl"))[0].extra == {"tag": "own", "other": 1}


@pytest.mark.parametrize(
    ("text", "source", "truth"),
    [
        ('A sign that says "Step Goal Achieved" and "more"', "ocr", "Step Goal Achieved"),
        ('A sign that says "Hi"', "my-OCR_set", "Hi"),
        ("A sign", "ocr", "A sign"),
        ('A sign that says ""', "ocr", 'A sign that says ""'),
        ('A sign that says "Hi"', "pickscore", 'A sign that says "Hi"'),
        ('A mediocre "x"', "mediocre", 'A mediocre "x"'),
    ],
)
def test_the_quoted_text_of_an_ocr_prompt_is_its_ground_truth(text, source, truth):
    assert default_ground_truth(text, source) == truth


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("dataset/ocr/train.txt", "ocr"),
        ("dataset/geneval/test_metadata.jsonl", "geneval"),
        ("dataset/pickscore/pickscore.txt", "pickscore"),
        ("x/drawbench_test.txt", "drawbench_test"),
    ],
)
def test_a_file_named_after_its_part_has_its_folder_as_source(tmp_path, path, source):
    assert default_source(tmp_path / path) == source


@pytest.mark.parametrize(
    ("name", "content", "texts"),
    [
        ("bom.txt", b"\xef\xbb\xbfa cat\na dog\n", ["a cat", "a dog"]),
        ("bom.jsonl", b'\xef\xbb\xbf{"prompt": "a cat"}\n', ["a cat"]),
        ("array.json", b'[{"prompt": "a cat"},\n {"prompt": "a dog"}]', ["a cat", "a dog"]),
        ("array.jsonl", b'[{"prompt": "a cat"}]', ["a cat"]),
        ("strings.json", b'["a cat", "a dog"]', ["a cat", "a dog"]),
        ("strings.jsonl", b'"a cat"\n"a dog"\n', ["a cat", "a dog"]),
        ("one.json", b'{\n "prompt": "a cat"\n}\n', ["a cat"]),
        ("lines.json", b'{"prompt": "a cat"}\n{"prompt": "a dog"}\n', ["a cat", "a dog"]),
        ("separator.jsonl", '{"prompt": "a\u2028b\u0085c"}\n'.encode(), ["a\u2028b\u0085c"]),
        ("separator.txt", "a\u2028b\n".encode(), ["a\u2028b"]),
        ("windows.txt", b"a cat\r\na dog\r\n", ["a cat", "a dog"]),
        ("mac.txt", b"a cat\ra dog\r", ["a cat", "a dog"]),
        ("upper.JSONL", b'{"prompt": "a cat"}', ["a cat"]),
        ("upper.TXT", b"a cat", ["a cat"]),
        ("emoji.txt", "a \U0001f431 cat\n".encode(), ["a \U0001f431 cat"]),
        ("parts.jsonl", b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a cat"}]}]}', ["a cat"]),
    ],
)
def test_a_file_of_an_unusual_form_is_read(tmp_path, name, content, texts):
    (tmp_path / name).write_bytes(content)
    assert [prompt.text for prompt in read_prompts(str(tmp_path / name))] == texts


def test_the_prompt_of_a_chat_is_its_users_last_message(tmp_path):
    roles = {"system": "draw", "user": "a cat", "assistant": "done", "User": "no role"}
    chat = [{"role": role, "content": content} for role, content in roles.items()]
    chat.insert(3, {"role": "user", "content": "a dog"})
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": chat}))
    assert [prompt.text for prompt in read_prompts(str(tmp_path / "chat.jsonl"))] == ["a dog"]


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("missing.jsonl", None, "must name an existing file"),
        ("empty.txt", "\n \n", "is empty"),
        ("nocolumn.jsonl", '{"text": "a cat"}\n', "must have a column 'prompt', got columns ['text']; rename"),
        ("broken.jsonl", '{"prompt": "a"}\n{"prompt": \n', "line 2"),
        ("broken.json", '[{"prompt": "a"}', "is not a JSON array"),
        ("deep.json", "[" * 100_000, "nested too deeply"),
        ("whole.json", json.dumps([[{"prompt": "a"}] * 10_000]), "item 1 of"),
        ("image.jsonl", json.dumps({"prompt": "a", "images": ["iVBOR" * 2000]}), "images that are files, but "),
        ("list.jsonl", '{"prompt": "a"}\n[1]\n', "must be a JSON object, got [1];"),
        ("number.json", "7", "item 1 of"),
        ("wrapped.json", '{"data": [{"prompt": "a cat"}]}', "must have a column 'prompt', got columns ['data'];"),
        ("number.jsonl", '{"prompt": 5}\n', "must have a prompt that is a non-empty string"),
        ("part.jsonl", '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}', "a user message, got"),
        ("system.jsonl", '{"prompt": [{"role": "system", "content": "a"}]}', "a chat with a user message, got"),
        ("nul.jsonl", '{"prompt": "a\\u0000b"}', "without NUL characters"),
        ("half.jsonl", '{"prompt": "a \\ud83d cat"}', "halves of surrogate pairs"),
        (
            "negative.jsonl",
            '{"prompt": "a", "negative_prompt": 7}',
            "must have a negative_prompt that is a string, got 7",
        ),
        ("source.jsonl", '{"prompt": "a", "data_source": 7}', "must have a data_source that is a string, got 7;"),
        ("extra.jsonl", '{"prompt": "a", "extra_info": "x"}', "must have an object as extra_info, got 'x';"),
        ("model.jsonl", '{"prompt": "a", "reward_model": "x"}', "must have an object as reward_model, got 'x'"),
        ("image.jsonl", '{"prompt": "a", "images": 7}', "must have images that are a path or a list of paths, got 7;"),
        ("image.jsonl", '{"prompt": "a", "images": "b.png"}', "b.png' is missing; paths are relative to"),
        ("prompts.xlsx", "a,b\n", "must name files ending in one of"),
        ("bad.parquet", "not parquet", "is not a readable parquet file"),
        ("latin.txt", b"a cat\nd\xe9j\xe0 vu\n", "line 2 of"),
        ("latin.jsonl", b'{"prompt": "\xe9"}', "must be UTF-8, got the byte 0xe9; save the file as UTF-8"),
        ("wide.txt", "a cat".encode("utf-16"), "save the file as UTF-8, e.g. with iconv -f utf-16 -t utf-8 wide.txt"),
        ("long" * 100 + ".txt", None, "must name files that can be read"),
        ("s3://bucket/a.txt", None, "prompts are read from this machine: fetch it first"),
        (
            "ragged.csv",
            "prompt,tag\na cat,x\na dog\n",
            "must have 2 cells in line 3, as its header has, got 1; put quotes",
        ),
        ("ragged.tsv", "prompt\ta\nx\ty\tz\n", "got 3; put quotes around a text with tabs"),
        ("open.csv", 'prompt\n"a cat\n', "with quotes in pairs, but line 2 is not (unexpected end of data)"),
        (
            "twice.csv",
            "prompt,tag,tag\na,b,c\n",
            "columns with names of their own in line 1, got tag twice; rename one",
        ),
        ("headless.csv", "a cat\na dog\n", "must have a column 'prompt', got columns ['a cat'];"),
        ("text.jsonl.gz", b"a cat", "text.jsonl.gz' (BadGzipFile: Not a gzipped file (b'a '))"),
        ("cut.txt.gz", gzip.compress(b"a cat" * 99, mtime=0)[:-9], "must be a readable gzip file"),
        ("empty.txt.gz", gzip.compress(b"", mtime=0), "is empty; add prompts"),
        (
            "truth.jsonl",
            '{"prompt": "a", "ground_truth": 1, "reward_model": {"ground_truth": 2}}',
            "one reference, got",
        ),
        ("hf://words", None, "must name a dataset of the hub by hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT], got"),
    ],
)
def test_a_bad_file_is_an_error_that_names_key_file_and_rule(tmp_path, name, content, rule):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ValueError) as failure:
        read_prompts(str(path) if "://" not in name else name, "data.val_files")
    message = str(failure.value)
    assert rule in message and message.startswith("data.val_files") and "\n" not in message
    assert name.rpartition("/")[2] in message and len(message) < 1000  # not a whole file
    assert ";" in message  # the remedy follows


@pytest.mark.parametrize("files", [None, "", 5, {}, {"a": 1}, [], [5], ["a.txt", None], [["a.txt"]], True])
def test_what_is_no_path_is_refused(files):
    with pytest.raises(ValueError, match=r"data\.train_files must name a prompt file or a list of them, got"):
        read_prompts(files)


def test_a_file_that_cannot_be_read_is_told_with_its_reason(tmp_path):
    (tmp_path / "memory.txt").symlink_to("/proc/self/mem")  # readable by permission, and an input/output error
    with pytest.raises(
        ValueError, match=r"must name files that can be read, got '.*memory.txt' \(Input/output error\)"
    ):
        read_prompts(str(tmp_path / "memory.txt"))


def test_images_are_found_beside_the_file(tmp_path):
    (tmp_path / "b.png").write_bytes(b"")
    first = f'{{"prompt": "a", "images": ["b.png", "../{tmp_path.name}/b.png"]}}'
    (tmp_path / "p.jsonl").write_text(f'{first}\n{{"prompt": "b", "images": []}}\n{{"prompt": "c"}}\n')
    found = [prompt.images for prompt in read_prompts(str(tmp_path / "p.jsonl"))]
    assert found == [(str(tmp_path / "b.png"), f"{tmp_path}/../{tmp_path.name}/b.png"), (), ()]


def test_a_pair_of_pictures_is_found_beside_the_file(tmp_path):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(b"")
    first = '{"prompt": "a", "chosen": "a.png", "rejected": ["b.png"]}'
    (tmp_path / "p.jsonl").write_text(f'{first}\n{{"prompt": "b", "chosen": null}}\n{first}\n')
    found = read_prompts(str(tmp_path / "p.jsonl"))
    assert [prompt.pair for prompt in found][:2] == [(str(tmp_path / "a.png"), str(tmp_path / "b.png")), ()]
    assert found[0].extra == {} and count_repeated(found) == 1
    swapped = first.replace("chosen", "x").replace("rejected", "chosen").replace('"x"', '"rejected"')
    (tmp_path / "p.jsonl").write_text(f"{first}\n{swapped}\n")
    assert count_repeated(read_prompts(str(tmp_path / "p.jsonl"))) == 0
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "chosen": "a.png"}')
    with pytest.raises(
        ValueError, match=r"line 1 of '.*p.jsonl' must have one picture in each of the columns .*got 1 and 0"
    ):
        read_prompts(str(tmp_path / "p.jsonl"))


def test_the_dataset_gives_verls_rows_and_honours_max_samples(tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    dataset = DiffusionPromptDataset(str(tmp_path / "p.txt"), max_samples=2)
    assert len(dataset) == 2
    row = PromptRow("two", "p", "two", index=1)
    assert dataset[1] == {"raw_prompt": "two", "index": 1, "uid": "", "row": row}


def test_long_prompts_are_found_by_text_or_negative_prompt_and_the_tokenizer_is_loaded_once():
    loaded = []

    def load_check():
        loaded.append(1)

        def check(text):
            if len(text) > 300:
                raise ValueError(f"{len(text)} characters")

        return check

    short, long = "a" * 200, "b" * 301
    prompts = [
        PromptRow(short, "s", ""),
        PromptRow(long, "s", ""),
        PromptRow("a", "s", "", long),
        PromptRow("c" * 300, "s", ""),
    ]
    found = find_too_long(prompts, load_check)
    assert [prompts.index(one.prompt) for one in found] == [1, 2] and found[0].reason == "301 characters"
    assert without(prompts, found) == [prompts[0], prompts[3]] and loaded == [1]
    assert "2 of 4 prompts of data.train_files are left out" in describe_dropped("data.train_files", found, 4)
    assert find_too_long(prompts[:1], load_check) == [] and loaded == [1]


def test_the_dataset_warns_of_what_it_leaves_out_and_refuses_to_be_empty(tmp_path, tiny_wan, caplog):
    from omegaconf import OmegaConf

    (tmp_path / "p.txt").write_text("short\n" + "red " * 600)
    keys = {"prompt_key": "prompt", "reward_fn_key": "data_source", "image_key": "images"}
    config = OmegaConf.create({"filter_overlong_prompts": True, "custom_cls": {"checkpoint": str(tiny_wan)}, **keys})
    with caplog.at_level(logging.WARNING, logger=dataset_module.__name__):
        assert len(DiffusionPromptDataset(str(tmp_path / "p.txt"), config=config)) == 1
    assert "1 of 2 prompts" in caplog.text and "line 2 of" in caplog.text
    (tmp_path / "p.txt").write_text("red " * 600)
    with pytest.raises(ValueError, match="must hold a prompt that the model reads to its end, got none"):
        DiffusionPromptDataset(str(tmp_path / "p.txt"), config=config)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".json", ".csv", ".parquet", ".txt.gz"])
@pytest.mark.parametrize(
    ("content", "said"), [(POINTER, "a pointer of Git LFS; fetch"), ("\ufeff\n<!DOCTYPE html><html>", "a page of HTML")]
)
def test_what_a_download_left_in_place_of_a_file_is_refused(tmp_path, suffix, content, said):
    (tmp_path / f"a{suffix}").write_text(content)
    with pytest.raises(ValueError, match=f"must name files of prompts, got .*, which is {said}"):
        read_prompts(str(tmp_path / f"a{suffix}"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("<?xml version='1.0'?><Error/>", "a page of XML; download"),
        ("404: Not Found", "a server's answer; download"),
        ('{"prompt": "a"}\n', "JSON and no lines of prompts; name it .jsonl"),
    ],
)
def test_text_that_is_no_list_of_prompts_is_refused(tmp_path, content, said):
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ValueError, match=f"must name files of prompts, got .*, which is {said}"):
        read_prompts(str(tmp_path / "a.txt"))


def test_a_name_of_the_hub_without_its_scheme_is_answered_with_it():
    with pytest.raises(ValueError, match="got 'someone/prompts'; check the path, or write hf://someone/prompts for"):
        read_prompts("someone/prompts")


ROWS = [
    PromptRow("a", "s", None, uid="p0", index=0),
    PromptRow(
        *("b", "s", {"shape": ["circle"]}, "ugly", {"tags": ["x", "y"], "n": 2}),
        uid="p1",
        index=1,
        images=("/b.png",),
        pair=("/c.png", "/r.png"),
    ),
    PromptRow("c", "t", "x", "", uid="p2", index=2),
]


def test_rows_and_batches_are_each_other_s_inverse():
    batch = prompt_batch(ROWS)
    assert prompt_rows(batch) == ROWS
    assert list(batch["uid"]) == ["p0", "p1", "p2"] and list(batch["raw_prompt"]) == ["a", "b", "c"]
    assert [row for part in batch.chunk(2) for row in prompt_rows(part)] == ROWS
    assert prompt_rows(prompt_batch(ROWS[1:2])) == ROWS[1:2]


def test_a_custom_agent_loop_gets_verls_columns_and_they_make_the_row_again():
    columns = loop_columns(ROWS[1])
    assert columns == {
        "raw_prompt": "b",
        "negative_prompt": "ugly",
        "data_source": "s",
        "reward_model": {"ground_truth": {"shape": ["circle"]}},
        "extra_info": {"tags": ["x", "y"], "n": 2},
        "images": ("/b.png",),
        "pair": ("/c.png", "/r.png"),
        "index": 1,
        "uid": "p1",
    }
    assert loop_row({**columns, "session_id": 3}) == ROWS[1]
