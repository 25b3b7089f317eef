# SPDX-License-Identifier: Apache-2.0
"""A `diffusers` replica with compiled blocks: its forwards read the weights of every update, also after a sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from tests.engine.sequence_cases import CASES, build
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs import PromptInputs
from verl_digen.models import kernels
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Generation, PathRecord, SampleRequest, Sampling
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.receiver import tensors_of_update
from verl_digen.weights.sending import Wire, send_update

pytestmark = pytest.mark.long

CASE = CASES["wan2.1"]
ATOL = 1e-5
ANSWER_S = 300.0


@pytest.fixture(autouse=True)
def compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


def server_of(path: Path, *, is_lora: bool, compiles: bool) -> DiffusersServer:
    digen = DigenConfig(
        seed=7,
        compile=compiles,
        rollout=RolloutConfig(max_batch_size=8, batch_wait_s=0.2, update_timeout_s=ANSWER_S),
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=list(CASE.lora)) if is_lora else None
    model = SimpleNamespace(local_path=path, digen=digen, lora_rank=4 * is_lora, adapter_config=lambda: adapter)
    server = DiffusersServer(SimpleNamespace(dtype="float32"), model, num_threads=1)
    server._frees_memory = True  # as on an accelerator
    return server


async def generate(server: DiffusersServer) -> list[Generation]:
    """Three samples, SDE steps included; prompts differ in length."""
    sampling = Sampling(CASE.geometry, 3, true_cfg_scale=3.0, law="flow", noise_level=0.7)
    window, negative = Window((0, 1), (0, 1)), PromptInputs("", (), 64)
    texts = ("a cat", "a cat that looks at a dog", "a dog")
    requests = [
        SampleRequest(f"p{number}", 0, PromptInputs(text, (), 64), negative, window, sampling, False)
        for number, text in enumerate(texts)
    ]
    return await asyncio.gather(*(server.generate("id", [], {"request": request}) for request in requests))


def path_of(generation: Generation) -> PathRecord:
    assert isinstance(generation.trajectory.record, PathRecord)
    return generation.trajectory.record


def assert_same(found: list[Generation], expected: list[Generation], version: int) -> None:
    for got, own in zip(found, expected, strict=True):
        assert got.trajectory.version == got.trajectory.last_version == version
        torch.testing.assert_close(path_of(got).latents, path_of(own).latents, atol=ATOL, rtol=0)
        torch.testing.assert_close(path_of(got).log_probs, path_of(own).log_probs, atol=ATOL, rtol=0)
        assert (got.pixels.int() - own.pixels.int()).abs().max() <= 1


def eager(path: Path, *, is_lora: bool, seed: int | None) -> tuple[list[Generation], dict[str, Tensor]]:
    """Samples without compiled blocks under other weights, and these weights; None: those of the checkpoint."""
    server = server_of(path, is_lora=is_lora, compiles=False)
    held = tensors_of_update(server._weights.module)
    generator = torch.Generator().manual_seed(seed or 0)
    weights = {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in held.items()}
    if seed is not None:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(weights[name])
    return asyncio.run(generate(server)), weights


async def update(server: DiffusersServer, weights: dict[str, Tensor], version: int, *, is_live: bool) -> None:
    """Send an update as the trainer's rank does, and have it loaded."""
    with TemporaryDirectory() as folder:
        wire = Wire(f"ipc://{folder}/s", True, is_live, torch.float32, max_bucket_mb=1, timeout_s=ANSWER_S)
        await server.begin_update(wire.handle, wire.use_shm, wire.is_live)

        def send() -> Any:
            return asyncio.run(send_update(weights.items(), wire, receiver="replica", has_died=lambda: False))

        total = await asyncio.to_thread(send)
    manifest = Manifest(version, total.num_tensors, total.value)
    if is_live:
        await server.commit_update(manifest)
    else:
        await server.seal_update(manifest)
        await server.activate_weights()


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_compiled_blocks_compute_with_the_weights_of_the_last_update(tmp_path: Path, is_lora: bool):
    path = build(CASES["wan2.1"], tmp_path / "checkpoint")
    before, _ = eager(path, is_lora=is_lora, seed=None)
    updates = [eager(path, is_lora=is_lora, seed=version) for version in (1, 2)]

    async def run() -> None:
        server = server_of(path, is_lora=is_lora, compiles=True)
        assert_same(await generate(server), before, version=0)
        for version, (expected, weights) in enumerate(updates, start=1):
            if is_live := version == 2:
                await server.sleep()
                await server.wake_up()
            await update(server, weights, version, is_live=is_live)
            assert_same(await generate(server), expected, version)
            assert (path_of(expected[0]).latents - path_of(before[0]).latents).abs().max() > 0.01

    asyncio.run(run())
