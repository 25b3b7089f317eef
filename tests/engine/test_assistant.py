# SPDX-License-Identifier: Apache-2.0
"""Samples that the trainer's ranks generate, against those a replica with the same weights generates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import (
    LORA,
    NUM_STEPS,
    SIZE_PX,
    TEXT_WIDTH,
    begin,
    fragment,
    make_batch,
    make_engine,
    on_two_ranks,
    peek,
    perturb,
)
from verl_digen.algorithms.window import Window
from verl_digen.engine.assistant import Assistant
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Generation, Geometry, SampleRequest, Sampling

VERSION = 7
MODELS: dict[str, dict[str, Any]] = {"full": {}, "lora": LORA}


def requests(count: int, true_cfg_scale: float = 3.0) -> list[SampleRequest]:
    sampling = Sampling(Geometry(SIZE_PX, SIZE_PX), NUM_STEPS, true_cfg_scale, "flow", 0.7)
    window = Window((0, 1, 2), (0, 1))
    return [SampleRequest("p3", index, "a cat", "", window, sampling, index == 0) for index in range(count)]


def condition(num_tokens: int) -> Condition:
    generator = torch.Generator().manual_seed(num_tokens)
    return {"embeds": torch.randn(num_tokens, TEXT_WIDTH, generator=generator)}


def assistant_of(engine: Any) -> Assistant:
    return Assistant(engine, latents_dtype=torch.float32, decoder_dtype=torch.float32)


def assist(engine: Any, count: int) -> list[Generation]:
    return assistant_of(engine).generate(requests(count), condition(4), condition(2), version=VERSION)


def by_sampler(engine: Any, count: int) -> Sequence[Any]:
    """The trajectories of a sampler over the same module, one sample at a time."""
    sampler = Sampler(
        engine.model, engine.module, run_seed=engine.digen.seed, device="cpu", latents_dtype=torch.float32
    )
    with engine.assisting():
        return [
            sampler.sample([request], [condition(4)], [condition(2)], version=VERSION)[0][0]
            for request in requests(count)
        ]


def assert_same(found: Generation, expected: Any) -> None:
    trajectory = found.trajectory
    assert (trajectory.uid, trajectory.sample_index, trajectory.seed) == (
        expected.uid,
        expected.sample_index,
        expected.seed,
    )
    assert trajectory.version == trajectory.last_version == VERSION
    torch.testing.assert_close(trajectory.latents, expected.latents, atol=1e-5, rtol=0)
    torch.testing.assert_close(trajectory.log_probs, expected.log_probs, atol=1e-5, rtol=0)
    assert found.pixels.shape == (SIZE_PX, SIZE_PX, 3) and found.pixels.dtype == torch.uint8
    assert found.condition is None, "the conditions are in TransferQueue already"


@pytest.mark.parametrize("model", MODELS)
def test_the_trainer_generates_what_a_replica_would_and_leaves_the_open_gradient(one_rank, tiny_qwen_image, model):
    engine = make_engine(tiny_qwen_image, model=MODELS[model])
    perturb(engine)
    groups = begin(engine, make_batch(tiny_qwen_image), [1.0, 2.0, 4.0, 8.0, 3.0, 5.0])
    engine.accumulate(fragment(groups, next(iter(groups))))
    before = peek(engine)
    found = assist(engine, 3)
    after = peek(engine)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    for generation, expected in zip(found, by_sampler(engine, 3), strict=True):
        assert_same(generation, expected)
    engine.abort()


def shares(path: Path, folder: Path) -> dict[int, Any]:
    """Number of requests -> (what each rank generated, what one sampler makes of them)."""
    engine = make_engine(path)
    results = {}
    for count in (1, 2, 5):
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, assist(engine, count))
        results[count] = gathered, by_sampler(engine, count)
    return results


@pytest.mark.slow
def test_ranks_share_the_samples_and_one_without_any_takes_part(tiny_qwen_image, tmp_path):
    for count, (by_rank, expected) in on_two_ranks([shares], tiny_qwen_image, tmp_path)["shares"].items():
        assert [len(found) for found in by_rank] == [-(-count // 2), count // 2]
        found = sorted((sample for part in by_rank for sample in part), key=lambda one: one.trajectory.sample_index)
        for generation, trajectory in zip(found, expected, strict=True):
            assert_same(generation, trajectory)
