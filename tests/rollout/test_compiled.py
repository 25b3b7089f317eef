# SPDX-License-Identifier: Apache-2.0
"""A `diffusers` replica with compiled blocks: its forwards read the weights of every update, also after a sleep."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from tests.engine.sequence_cases import CASES, build
from tests.rollout.test_server import ask, begin_and_send, make_server
from tests.sampling.runs import close, path_of
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Generation, SampleRequest, Sampling
from verl_digen.weights.receiver import tensors_of_update

pytestmark = [pytest.mark.long, pytest.mark.grid, pytest.mark.usefixtures("without_a_compiler")]

CASE = CASES["wan2.1"]
ANSWER_S = 300.0


async def generate(server: DiffusersServer) -> list[Generation]:
    """Three samples, SDE steps included; prompts differ in length."""
    sampling = Sampling(CASE.geometry, 3, true_cfg_scale=3.0, law="flow", noise_level=0.7)
    window, negative = Window((0, 1), (0, 1)), PromptInputs("", (), 64)
    texts = ("a cat", "a cat that looks at a dog", "a dog")
    requests = [
        SampleRequest(f"p{number}", 0, PromptInputs(text, (), 64), negative, window, sampling, False)
        for number, text in enumerate(texts)
    ]
    return await ask(server, requests)


def server_of(path: Path, *, is_lora: bool, compiles: bool) -> DiffusersServer:
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=list(CASE.lora)) if is_lora else None
    server = make_server(path, max_batch_size=8, adapter=adapter, compiles=compiles, update_timeout_s=ANSWER_S)
    server._frees_memory = True  # as on an accelerator
    return server


def assert_same(found: list[Generation], expected: list[Generation], version: int) -> None:
    for got, own in zip(found, expected, strict=True):
        assert got.trajectory.facts.version == got.trajectory.facts.last_version == version
        close(path_of(got.trajectory).latents, path_of(own.trajectory).latents)
        close(path_of(got.trajectory).log_probs, path_of(own.trajectory).log_probs)
        assert (got.pixels.int() - own.pixels.int()).abs().max() <= 1


async def eager(path: Path, *, is_lora: bool, seed: int | None) -> tuple[list[Generation], dict[str, Tensor]]:
    """Samples without compiled blocks under other weights, and these weights; None: those of the checkpoint."""
    server = server_of(path, is_lora=is_lora, compiles=False)
    held = tensors_of_update(server._weights.module)
    generator = torch.Generator().manual_seed(seed or 0)
    weights = {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in held.items()}
    if seed is not None:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(weights[name])
    return await generate(server), weights


@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
async def test_compiled_blocks_compute_with_the_weights_of_the_last_update(tmp_path: Path, is_lora: bool):
    path = build(CASES["wan2.1"], tmp_path / "checkpoint")
    before, _ = await eager(path, is_lora=is_lora, seed=None)
    updates = [await eager(path, is_lora=is_lora, seed=version) for version in (1, 2)]
    server = server_of(path, is_lora=is_lora, compiles=True)
    assert_same(await generate(server), before, version=0)
    for version, (expected, weights) in enumerate(updates, start=1):
        if is_live := version == 2:
            await server.sleep()
            await server.wake_up()
        manifest = await begin_and_send(server, weights, version, is_live=is_live, timeout_s=ANSWER_S)
        if is_live:
            await server.commit_update(manifest)
        else:
            await server.seal_update(manifest)
            await server.activate_weights()
        assert_same(await generate(server), expected, version)
        assert (path_of(expected[0].trajectory).latents - path_of(before[0].trajectory).latents).abs().max() > 0.01
