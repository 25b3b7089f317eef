# SPDX-License-Identifier: Apache-2.0
"""Batches of a replica on the pretend device (`tests.pretend`), where copies to the host arrive late."""

import asyncio
import pickle
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.pretend.phases import GUIDED, make_server
from tests.pretend.process import on_pretend
from tests.pretend.record import recording
from tests.rollout.test_server import ask, generate
from tests.tiny_models import build_tiny
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.pixels import in_batches
from verl_digen.types import Burst, Generation, Geometry, SampleRequest, Sampling, Trajectory, move_condition

NUM_STEPS = 4


def requests_of(name: str) -> list[SampleRequest]:
    """Two chunks of two samples of one prompt."""
    is_video = name.startswith("wan")
    geometry = Geometry(64, 64, 5) if is_video else Geometry(64, 64)
    scale = GUIDED if is_video else 1.0  # Qwen-Image's network stalls where texts differ in length
    sampling = Sampling(geometry, NUM_STEPS, true_cfg_scale=scale, law="flow", noise_level=0.7)
    first = SampleRequest(
        "a", 0, PromptInputs("a red circle"), PromptInputs(" "), Window((0, 1), (0, 1)), sampling, wants_latents=True
    )
    return [
        replace(first, uid=uid, sample_index=index, wants_condition=index == 0, burst=Burst(uid, 2))
        for uid in "ab"
        for index in range(2)
    ]


class ByThread(Counter[tuple[str, str]]):
    """Stalls, noted in `stalls` too, by the name of the thread that waited."""

    def __init__(self, stalls: dict[str, list[str]]):
        super().__init__()
        self._noted = stalls

    def __setitem__(self, key: tuple[str, str], count: int) -> None:
        self._noted.setdefault(threading.current_thread().name.split("_")[0], []).append(" ".join(key))
        super().__setitem__(key, count)


def run_two_batches(name: str, path: Path) -> tuple[list[str], list[str]]:
    """Stalls of the threads that compute and answer, while two batches run; checks their answers."""
    server, asked = make_server(path, max_batch_size=2), requests_of(name)
    stalls: dict[str, list[str]] = {"denoise": [], "answer": []}

    async def run() -> list[Generation]:
        await ask(server, asked)  # encodes the prompts, and does what the first call alone does
        server._samples._ended_s += 3600.0  # as if the clock had been set back by an hour
        with recording() as record:
            record.stalls = ByThread(stalls)
            return await ask(server, asked)

    answers = asyncio.run(run())
    for batch, got in ((asked[:2], answers[:2]), (asked[2:], answers[2:])):
        check(server, batch, got)
    return stalls["denoise"], stalls["answer"]


def check(server, batch: list[SampleRequest], answers: list[Generation]) -> None:
    """Compare with the same batch, made one thing after the other."""
    on_host = server._prompts.lookup([inputs for one in batch for inputs in one.branches])
    known = {inputs: move_condition(condition, "pretend") for inputs, condition in on_host.items()}
    positive = [known[one.inputs] for one in batch]
    negative = [known[one.negative_inputs] for one in batch] if batch[0].sampling.is_guided else None
    trajectories, latents = server._samples.sampler.sample(batch, positive, negative, version=0)
    pixels = in_batches(server._samples.decoder, latents, batch[0].sampling.geometry, 4).pixels
    for row, (got, expected) in enumerate(zip(answers, trajectories, strict=True)):
        same_records(got.trajectory, expected)
        assert torch.equal(got.pixels, pixels[row]) and torch.equal(got.latents.final, latents[row].cpu())
        assert (got.condition is not None) == batch[row].wants_condition
        for carried, own in ((got.condition, positive[row]), (got.latents.condition, positive[row])):
            if carried is not None:
                assert all(torch.equal(tensor, own[key].cpu()) for key, tensor in carried.items())
        assert got.started_s <= got.ended_s


def same_records(got: Trajectory, expected: Trajectory) -> None:
    assert (got.facts.uid, got.facts.sample_index, got.facts.version) == (
        expected.facts.uid,
        expected.facts.sample_index,
        expected.facts.version,
    )
    for name, column in got.record.columns().items():
        assert column.device.type == "cpu" and torch.equal(column, expected.record.columns()[name]), name


def test_an_answer_is_sent_with_the_memory_of_one_sample(tiny_qwen_image: Path) -> None:
    server = make_server(tiny_qwen_image, max_batch_size=8)
    asked = [replace(one, wants_condition=False) for one in requests_of("qwen_image")] * 2
    for got in generate(server, asked):
        assert got.latents is not None
        tensors = [got.pixels, got.latents.final, *got.trajectory.record.columns().values()]
        own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        sent = replace(got, latents=replace(got.latents, condition={}))
        assert len(pickle.dumps(sent)) < own + 16_000, "one picture is 12 kB, a batch of them 98 kB"


@pytest.mark.parametrize("name", ["qwen_image", "wan2.1"])
def test_nothing_between_two_batches_waits_for_the_device(name: str, tmp_path: Path) -> None:
    computing, answering = on_pretend(run_two_batches, name, build_tiny(name, tmp_path / name))
    assert computing == []
    assert [stall.split(":")[0] for stall in answering] == ["synchronize verl_digen/hardware/transfers.py"] * 2
