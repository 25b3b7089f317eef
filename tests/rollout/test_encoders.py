# SPDX-License-Identifier: Apache-2.0
"""Text encoders that wait on the host while the transformer runs, on the pretend device (`tests.pretend`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.pretend.phases import make_server
from tests.pretend.process import on_pretend
from tests.rollout.test_samples import requests_of
from tests.rollout.test_server import update, weights_of
from tests.tiny_models import build_tiny
from verl_digen.config import RolloutConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Generation, SampleRequest

GB = 10**9


def held(modules) -> int:
    """Bytes of device memory of modules."""
    return sum(each.untyped_storage().nbytes() for module in modules for each in module.state_dict().values())


def note_turns(networks: dict[str, Any], held: Callable[[Any], int], *, on_host: bool) -> list[str]:
    """The networks ("encode" and "denoise") that run from now on, in turn; with encoders on the host the one that does
    not run is not on the device."""
    ran: list[str] = []

    def note(kind: str, other: str) -> None:
        assert held(networks[kind]) and not (on_host and held(networks[other]))
        ran.extend([kind] if ran[-1:] != [kind] else [])

    for kind, other in (("encode", "denoise"), ("denoise", "encode")):
        for module in networks[kind]:
            module.register_forward_pre_hook(lambda *args, kind=kind, other=other: note(kind, other))
    return ran


async def generate(server: DiffusersServer, asked: list[SampleRequest], text: str) -> list[Generation]:
    requests = [replace(one, inputs=PromptInputs(f"{one.uid} {text}")) for one in asked]
    return await asyncio.gather(*[server._batcher.submit(one) for one in requests])


async def serve(name: str, path: Path, encoders: str) -> tuple[list[Generation], list[str]]:
    """Samples of two weight versions, with other prompts, and the networks that ran, in turn."""
    server, asked = make_server(path, max_batch_size=2, encoders=encoders), requests_of(name)
    networks = {"encode": server._encoders.encode.modules, "denoise": (server._weights.module,)}
    ran = note_turns(networks, held, on_host=encoders == "host")
    answers = await generate(server, asked, "green circle")
    await update(server, {name: tensor.cpu() for name, tensor in weights_of(server, 0.5).items()}, 1, max_bucket_mb=16)
    answers += await generate(server, asked, "blue box")
    first, _ = await server.encode(asked[0])  # as an assisting trainer asks; the prompt is new
    assert all(tensor.device.type == "cpu" for tensor in first.values())
    await server.sleep()
    assert not held(networks["encode"]) and not held(networks["denoise"])
    await server.wake_up()
    assert bool(held(networks["encode"])) == (encoders == "device")
    return answers, ran


def compare(name: str, path: Path) -> list[str]:
    (on_device, _), (on_host, ran) = (asyncio.run(serve(name, path, encoders)) for encoders in ("device", "host"))
    for one, other in zip(on_device, on_host, strict=True):
        assert torch.equal(one.pixels, other.pixels)
        assert torch.equal(one.trajectory.record.log_probs, other.trajectory.record.log_probs)
        for own, theirs in ((one.condition, other.condition), (one.negative_condition, other.negative_condition)):
            assert (own is None) == (theirs is None)
            for key in own or ():
                assert theirs is not None and torch.equal(own[key], theirs[key])
    return ran


@pytest.mark.parametrize("name", ["sd3", "wan2.1"])
def test_encoders_and_transformer_take_turns_and_samples_are_bitwise_those_of_both_on_the_device(name, tmp_path):
    ran = on_pretend(compare, name, build_tiny(name, tmp_path))
    assert ran == ["encode", "denoise", "encode", "denoise", "encode"], (
        "prompts of all batches that wait are encoded at once"
    )


@pytest.mark.parametrize(("setting", "device_bytes", "waits"), [
    ("auto", 24 * GB, True), ("auto", 80 * GB, False), ("auto", None, False),
    ("device", 24 * GB, False), ("host", None, True),
])  # fmt: skip
def test_large_encoders_wait_on_the_host(setting, device_bytes, waits):
    assert RolloutConfig(encoders=setting).hosts_encoders(18 * GB, device_bytes) is waits


def test_other_places_are_refused():
    with pytest.raises(ValueError, match=r"digen.rollout.encoders must be one of auto, device, host, before, got"):
        RolloutConfig(encoders="disk")
