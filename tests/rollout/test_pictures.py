# SPDX-License-Identifier: Apache-2.0
"""Pairs of pictures from their file to clean records: requests, and the replica that encodes them."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.rollout.test_server import generate, make_server
from tests.tags import make_facts
from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.noise import sample_seed
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.data.prompts import read_prompts
from verl_digen.data.rows import loop_columns, loop_row
from verl_digen.models import load_model
from verl_digen.models.pixels import fitted
from verl_digen.sampling.requests import condition_key, rows_per_group, sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import CleanRecord

DIGEN = DigenConfig(
    seed=7,
    loss={"name": "offline_dpo"},
    sampling=SamplingConfig(height_px=64, width_px=64, num_steps=4, val_num_steps=4, true_cfg_scale=1.0),
    forward=ForwardConfig(kind="logit_normal", num_points=2),
)


@pytest.fixture
def rows(tmp_path: Path):
    """Prompts p0, p1, p2, each with a pair of pictures of another size."""
    rng, lines = np.random.default_rng(0), []
    for number, size in enumerate(((64, 64), (80, 100), (40, 30))):
        pair = {name: f"{number}_{name}.png" for name in ("chosen", "rejected")}
        for name in pair.values():
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(tmp_path / name)
        lines.append(json.dumps({"prompt": f"prompt {number}", **pair}))
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    read = read_prompts(str(tmp_path / "pairs.jsonl"))
    return [replace(row, uid=f"p{number}") for number, row in enumerate(read)]


def ask(rows, **given):
    """Requests for both pictures of every row."""
    given = {"step": 0, "validate": False} | given
    return [sample_request(DIGEN, loop_row(loop_columns(row)), index, **given) for row in rows for index in range(2)]


def test_the_samples_of_a_group_are_the_two_pictures_under_one_noise_level(rows):
    requests = ask(rows)
    for number, row in enumerate(rows):
        chosen, rejected = requests[2 * number : 2 * number + 2]
        assert [Path(request.picture.reference).name for request in (chosen, rejected)] == [
            f"{number}_chosen.png",
            f"{number}_rejected.png",
        ]
        assert chosen.noise_levels == rejected.noise_levels and len(chosen.noise_levels.steps) == 2
        assert chosen.condition_key == condition_key(DIGEN, row)
    assert rows_per_group(DIGEN, 1) == 2
    assert [request.picture for request in ask(rows, validate=True)] == [None] * 6
    other = replace(DIGEN, loss={"name": "online_dpo"})
    assert sample_request(other, rows[0], 1, step=0, validate=False).picture is None


def test_a_replica_encodes_the_pictures_as_its_vae_does_and_generates_validation_samples(tiny_qwen_image, rows):
    requests, drawn = ask(rows), ask(rows, validate=True)
    server = make_server(tiny_qwen_image, max_batch_size=16)
    server._version = 3
    alone = make_server(tiny_qwen_image, max_batch_size=1)
    mixed = [request for pair in zip(requests, drawn, strict=True) for request in pair]
    answers = generate(server, mixed)
    made, generated = answers[::2], answers[1::2]
    model = load_model(tiny_qwen_image)
    decoder = model.load_decoder(torch.float32, torch.device("cpu"))
    sigmas = model.sigmas(4, requests[0].sampling.geometry)
    one_by_one = generate(alone, requests)
    for request, found, single in zip(requests, made, one_by_one, strict=True):
        with Image.open(request.picture.reference) as picture:
            expected = fitted(picture, request.sampling.geometry)
        assert torch.equal(found.pixels, expected)
        trajectory = found.trajectory
        assert isinstance(trajectory.record, CleanRecord)
        torch.testing.assert_close(trajectory.record.clean, decoder.encode(expected[None])[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(trajectory.record.clean, single.trajectory.record.clean, atol=1e-5, rtol=0)
        assert torch.equal(trajectory.record.sigmas, request.noise_levels.sigmas(sigmas))
        own = {"version": 3, "seed": sample_seed(7, request.uid, request.sample_index), "sampling": request.sampling}
        own |= {"num_steps": len(trajectory.record.sigmas), "condition_key": request.condition_key}
        assert trajectory.facts == make_facts(request.uid, request.sample_index, **own)
        assert (found.condition is not None) == (request.sample_index == 0) and found.negative_condition is None
    assert all(torch.equal(made[0].condition[name], value) for name, value in one_by_one[0].condition.items())
    sampled = {answer.pixels.numpy().tobytes() for answer in generated}
    assert len(sampled) == 6 and not sampled & {answer.pixels.numpy().tobytes() for answer in made}


def test_a_guided_prompt_brings_both_conditions(tiny_qwen_image, rows):
    (request, _), server = ask(rows[:1]), make_server(tiny_qwen_image)
    guided = replace(request, sampling=replace(request.sampling, true_cfg_scale=2.0))
    (answer,) = generate(server, [guided])
    condition, negative = asyncio.run(server.encode(guided))
    for found, expected in ((answer.condition, condition), (answer.negative_condition, negative)):
        assert found is not None and torch.equal(found["embeds"], expected["embeds"])


def test_a_picture_or_a_prompt_that_cannot_be_read_fails_its_own_sample_alone(tiny_qwen_image, rows):
    requests = ask(rows)
    Path(requests[1].picture.reference).write_bytes(b"no picture any more")
    Path(requests[2].picture.reference).unlink()
    requests[3] = replace(requests[3], inputs=replace(requests[3].inputs, text="red " * 2000))
    server = make_server(tiny_qwen_image, max_batch_size=16)
    answers = generate(server, requests, return_exceptions=True)
    errors = [str(answer) for answer in answers if isinstance(answer, BaseException)]
    assert [isinstance(answer, ValueError) for answer in answers] == [False, True, True, True, False, False]
    assert "has changed since its prompt was drawn" in errors[0] and "every node can read" in errors[1]
    assert "a prompt must have at most" in errors[2]


def test_a_picture_of_the_data_set_is_never_generated(tiny_qwen_image, rows):
    model = load_model(tiny_qwen_image)
    transformer = model.load_transformer(torch.float32)
    sampler = Sampler(model, transformer, run_seed=7, device=torch.device("cpu"), latents_dtype=torch.float32)
    request = ask(rows)[0]
    with pytest.raises(RuntimeError, match="sample 0 of group p0 is a picture of the data set, which is encoded"):
        sampler.sample([request], [{"embeds": torch.zeros(3, 64)}], None, version=0)
