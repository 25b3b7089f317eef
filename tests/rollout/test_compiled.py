# SPDX-License-Identifier: Apache-2.0
"""A `diffusers` replica with compiled blocks: its forwards read the weights of every update, also after a sleep."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.sequence_cases import CASES, build
from tests.rollout.test_lockstep import requests_of
from tests.rollout.test_peers import ANSWER_S, WAN, alone, arguments, assert_same, path_of
from verl_digen.models import kernels
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Generation
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.sending import Wire, send_update

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernels, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


def compiling(path: Path, *, is_lora: bool) -> DiffusersServer:
    rollout, model, num_threads = arguments(path, is_lora=is_lora)
    model.digen = replace(model.digen, compile=True)
    server = DiffusersServer(rollout, model, num_threads)
    server._frees_memory = True  # as on an accelerator
    return server


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
    before, _ = alone(path, is_lora=is_lora, seed=None)
    updates = [alone(path, is_lora=is_lora, seed=version) for version in (1, 2)]

    async def run() -> None:
        server = compiling(path, is_lora=is_lora)

        async def generate() -> list[Generation]:
            asked = [{"request": request} for request in requests_of(WAN)]
            return await asyncio.gather(*(server.generate("id", [], each) for each in asked))

        assert_same(await generate(), before, version=0)
        for version, (expected, weights) in enumerate(updates, start=1):
            if is_live := version == 2:
                await server.sleep()
                await server.wake_up()
            await update(server, weights, version, is_live=is_live)
            assert_same(await generate(), expected, version)
            assert (path_of(expected[0].trajectory).latents - path_of(before[0].trajectory).latents).abs().max() > 0.01

    asyncio.run(run())
