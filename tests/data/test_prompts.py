# SPDX-License-Identifier: Apache-2.0
import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_digen.data.dataset import DiffusionPromptDataset
from verl_digen.data.prompts import Prompt, read_prompts


def test_parquet_as_verl_users_write_it_is_read(tmp_path):
    rows = [
        {
            "prompt": [{"role": "system", "content": "draw"}, {"role": "user", "content": "a cat"}],
            "data_source": "ocr",
            "reward_model": {"style": "rule", "ground_truth": "CAT"},
            "extra_info": {"split": "train"},
        }
    ]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    assert read_prompts(str(tmp_path / "train.parquet")) == [Prompt("a cat", "ocr", "CAT", None, {"split": "train"})]


def test_jsonl_and_text_files_are_read_in_order_with_defaults(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a dog", "negative_prompt": "blurry"}) + "\n\n")
    (tmp_path / "b.txt").write_text("a bird\n\n  a fish  \n")
    prompts = read_prompts([str(tmp_path / "a.jsonl"), str(tmp_path / "b.txt")])
    assert [prompt.text for prompt in prompts] == ["a dog", "a bird", "a fish"]
    assert prompts[0].negative == "blurry" and prompts[0].data_source == "a"
    assert prompts[1].ground_truth == "a bird" and prompts[1].data_source == "b"


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        ("missing.jsonl", None, "must name an existing file"),
        ("empty.txt", "\n \n", "is empty"),
        ("nocolumn.jsonl", '{"text": "a cat"}\n', "must have a column 'prompt', got columns ['text']"),
        ("broken.jsonl", '{"prompt": \n', "line 1"),
        ("list.jsonl", "[1]\n", "must be a JSON object"),
        ("number.jsonl", '{"prompt": 5}\n', "must be a non-empty string"),
        ("prompts.csv", "a,b\n", "must name files ending in one of"),
        ("bad.parquet", "not parquet", "is not a readable parquet file"),
    ],
)
def test_a_bad_file_is_an_error_that_names_key_file_and_rule(tmp_path, name, content, rule):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError) as failure:
        read_prompts(str(path), "data.val_files")
    message = str(failure.value)
    assert rule in message and name in message and message.startswith("data.val_files") and "\n" not in message


def test_the_dataset_gives_verls_rows_and_honours_max_samples(tmp_path):
    (tmp_path / "p.txt").write_text("one\ntwo\nthree\n")
    dataset = DiffusionPromptDataset(str(tmp_path / "p.txt"), max_samples=2)
    assert len(dataset) == 2
    assert dataset[1] == {
        "raw_prompt": "two",
        "negative_prompt": None,
        "data_source": "p",
        "reward_model": {"ground_truth": "two"},
        "extra_info": {},
        "index": 1,
    }
