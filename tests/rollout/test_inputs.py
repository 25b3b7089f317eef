# SPDX-License-Identifier: Apache-2.0
"""Prompts with images, from their file to conditions, with a model that reads them and one that does not."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.rollout.test_server import make_server
from verl_digen.config import DigenConfig
from verl_digen.data.prompts import read_prompts
from verl_digen.data.rows import loop_columns, loop_row
from verl_digen.inputs.images import PromptInputs, source_image
from verl_digen.models.qwen_image import QwenImage
from verl_digen.models.text import one_by_one
from verl_digen.rollout import network
from verl_digen.rollout.encoders import PromptCache
from verl_digen.sampling.requests import condition_key, sample_request

DIGEN = DigenConfig()


@pytest.fixture(autouse=True)
def keep_the_devices_of_this_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


class Edits(QwenImage):
    """Qwen-Image that reads the mean colour of one image as a further text token."""

    spec = replace(QwenImage.spec, num_images=(1, 1))

    def load_encoder(self, dtype, device):
        encode_texts = super().load_encoder(dtype, device)

        def encode(inputs):
            (embeds,) = [condition["embeds"] for condition in encode_texts([PromptInputs(inputs.text)])]
            (image,) = inputs.images
            colour = torch.tensor(image.read().resize((1, 1)).getpixel((0, 0)), dtype=dtype, device=device) / 255
            token = colour.repeat(embeds.shape[1] // 3 + 1)[: embeds.shape[1]]
            return {"embeds": torch.cat([embeds, token[None]])}

        return one_by_one(encode, lambda text: None, torch.device("cpu"))


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    """Three prompts of one text: about red.png, about blue.png, and about a copy of red.png."""
    (tmp_path / "copies").mkdir()
    for name, colour in (("red.png", "red"), ("blue.png", "blue"), ("copies/red.png", "red")):
        Image.new("RGB", (8, 8), colour).save(tmp_path / name)
    rows = [{"prompt": "make it green", "images": given} for given in ("red.png", ["blue.png"], ["copies/red.png"])]
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def requests_of(path: Path):
    rows = [replace(row, uid=f"p{number}") for number, row in enumerate(read_prompts(str(path)))]
    return [sample_request(DIGEN, loop_row(loop_columns(row)), 0, step=0, validate=False) for row in rows]


def test_images_are_part_of_what_is_encoded(tiny_qwen_image, prompt_file, monkeypatch):
    monkeypatch.setattr(network, "load_model", Edits)
    server = make_server(tiny_qwen_image)
    red, blue, copy = requests_of(prompt_file)
    assert red.condition_key != blue.condition_key, "one text, two images"
    assert red.condition_key == copy.condition_key, "one content, two files"
    conditions = [asyncio.run(server.encode(request))[0]["embeds"] for request in (red, blue, copy)]
    assert not conditions[0].equal(conditions[1])
    assert conditions[0].equal(conditions[2])
    assert server._prompts.stats()["misses"] == (2 if len(red.branches) == 1 else 4), "the copy was not encoded again"


def test_the_negative_branch_has_the_images_too(prompt_file):
    digen = replace(DIGEN, sampling=replace(DIGEN.sampling, true_cfg_scale=3.0))
    (row, *_) = read_prompts(str(prompt_file))
    request = sample_request(digen, replace(row, uid="p0"), 0, step=0, validate=False)
    assert [branch.images for branch in request.branches] == [request.inputs.images] * 2
    assert condition_key(digen, row) == request.condition_key != condition_key(DIGEN, row)


def test_a_model_of_texts_refuses_images_and_says_so(tiny_qwen_image, prompt_file):
    server = make_server(tiny_qwen_image)
    with pytest.raises(ValueError, match="must have no images for a model that reads text alone, got 1 for 'make it"):
        asyncio.run(server.encode(requests_of(prompt_file)[0]))


def test_a_file_that_is_no_image_is_an_error(tmp_path):
    path = tmp_path / "source.png"
    path.write_text("not a picture")
    with pytest.raises(ValueError, match=r"must be a picture file, got '.*source.png' "):
        source_image(str(path)).read()


class Encode:
    """Encoder that refuses prompts containing "long" and records its calls."""

    def __init__(self):
        self.asked = []

    def __call__(self, prompts):
        self.asked.append(list(prompts))
        for prompt in prompts:
            if "long" in prompt:
                raise ValueError(f"{prompt} is too long")
        return [{f"of {prompt}": torch.zeros(1)} for prompt in prompts]


def names(found):
    return [(text, *condition) for text, condition in found.items()]


def test_a_prompt_is_encoded_once_while_there_is_room():
    encode = Encode()
    cache = PromptCache(encode, 2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert names(cache.lookup([text])) == [(text, f"of {text}")]
    assert encode.asked == [["a"], ["b"], ["c"], ["b"]], "b was the least recently used when c came"
    assert cache.stats() == {"hits": 2, "misses": 4, "size": 2, "max_size": 2}


def test_what_one_call_needs_is_there_even_without_room():
    encode = Encode()
    cache = PromptCache(encode, 1)
    assert list(cache.lookup(["a", "b", "a", "c"])) == ["a", "b", "c"]
    assert encode.asked == [["a", "b", "c"]]
    assert cache.stats() == {"hits": 1, "misses": 3, "size": 1, "max_size": 1}


def test_a_refused_prompt_refuses_no_other_and_is_not_kept():
    encode = Encode()
    cache = PromptCache(encode, 4)
    found = cache.lookup(["a", "long b", "c"])
    assert names({text: found[text] for text in "ac"}) == [("a", "of a"), ("c", "of c")]
    assert isinstance(found["long b"], ValueError) and str(found["long b"]) == "long b is too long"
    assert cache.stats()["size"] == 2
    assert isinstance(cache.lookup(["long b"])["long b"], ValueError)


def test_prompts_that_wait_are_encoded_in_the_turn_of_those_that_are_needed():
    encode = Encode()
    cache = PromptCache(encode, 3)
    cache.prepare(["a"], ["b", "c", "d", "a"])
    assert encode.asked == [["c", "d", "a"]], "as many as there is room for"
    cache.prepare(["a"], ["e"])
    assert len(encode.asked) == 1, "nothing is needed"
    assert cache.find(["a", "e"]) is None and names(cache.find(["a", "c"]) or {}) == [("a", "of a"), ("c", "of c")]
