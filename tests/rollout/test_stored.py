# SPDX-License-Identifier: Apache-2.0
"""Conditions in a folder: what they depend on, and a replica that reads them."""

import asyncio
import os
import shutil

import pytest
import torch

from tests.rollout.test_server import GUIDED, generate, make_requests, make_server
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.rollout.stored import READ_WHOLE, StoredConditions


def test_a_replica_without_encoders_makes_the_same_samples(tiny_qwen_image, tmp_path):
    requests = make_requests(GUIDED)[:4]
    with_encoders = make_server(tiny_qwen_image, batch_wait_s=60.0)  # whole batches
    expected = generate(with_encoders, requests)
    stored = StoredConditions(str(tmp_path), load_model(tiny_qwen_image), torch.float32)
    for prompt in {inputs for request in requests for inputs in request.branches}:
        (condition,) = with_encoders._encoders.encode([prompt])
        assert stored.write(prompt, condition) == stored.path(prompt).stat().st_size
    server = make_server(tiny_qwen_image, batch_wait_s=60.0, encoders="before", conditions_dir=str(tmp_path))
    assert server._encoders.encode.modules == ()
    for got, own in zip(generate(server, requests), expected, strict=True):
        assert torch.equal(got.trajectory.record.latents, own.trajectory.record.latents)
        assert torch.equal(got.pixels, own.pixels)
    unknown = make_requests(GUIDED)[-1]
    with pytest.raises(ValueError, match="must be known before the run with digen"):
        asyncio.run(server.encode(unknown))


def test_other_encoders_have_other_conditions_and_another_transformer_the_same(tiny_qwen_image, tmp_path):
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_qwen_image, checkpoint)

    def folder(dtype=torch.float32):
        return StoredConditions(str(tmp_path), load_model(checkpoint), dtype).folder

    before = folder()
    assert folder(torch.bfloat16) != before
    for part, changes in (("transformer", False), ("vae", True), ("tokenizer", True), ("text_encoder", True)):
        first = folder()
        largest = max((checkpoint / part).rglob("*.*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        assert (folder() != first) is changes, part
    found, content = {folder()}, bytearray(READ_WHOLE + 1)  # of such a file parts are read
    for place in (0, READ_WHOLE // 2, READ_WHOLE):
        content[place] = 1
        (checkpoint / "text_encoder" / "second.safetensors").write_bytes(content)
        found.add(folder())
    assert len(found) == 4


def test_what_was_not_used_for_longest_makes_room_and_what_the_run_uses_stays(tmp_path, tiny_qwen_image):
    stored = StoredConditions(str(tmp_path), load_model(tiny_qwen_image), torch.float32)
    prompts = [PromptInputs(text) for text in "abcd"]
    size = 0
    for age, prompt in enumerate(prompts):
        size = stored.write(prompt, {"embeds": torch.zeros(100)})
        os.utime(stored.path(prompt), (100.0 - age, 100.0 - age))  # "d" is the oldest
    used = {stored.path(prompts[3])}
    assert stored.make_room(used, 0, 4 * size) == 4 * size
    assert stored.make_room(used, size, 4 * size) == 3 * size
    assert [stored.path(prompt).is_file() for prompt in prompts] == [True, True, False, True]
    others = tmp_path / "model.safetensors", tmp_path / "vae" / "model.safetensors"
    partial = stored.path(prompts[0]).with_suffix(".killed-7")
    for path in (*others, partial):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(size))
    os.utime(partial, (1.0, 1.0))
    assert stored.make_room(used, 0, 4 * size) == 4 * size, "what lies beside does not count"
    assert stored.make_room(used, 0, 3 * size) == 3 * size and not partial.exists(), "a killed run left it"
    with pytest.raises(ValueError, match=r"digen.rollout.conditions_gb must hold the conditions of all 1 prompts"):
        stored.make_room(used, 4 * size, 4 * size)
    assert all(path.exists() for path in others), "no file of anyone else is removed"
