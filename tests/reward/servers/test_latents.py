# SPDX-License-Identifier: Apache-2.0
"""Rewards of latents: what is sent, what is refused, and that latents go to those alone that read them."""

import asyncio
from dataclasses import replace

import pytest
import torch
from aiohttp import web

from tests.reward.contract import make_picture, scores_of
from tests.reward.servers.services import red
from tests.reward.servers.test_protocols import ROW, Running, samples_of
from verl_digen.types import RewardInput, SampleLatents


def test_a_request_is_that_of_the_published_client():
    samples = samples_of(2)
    half = [replace(one, latents=SampleLatents(one.latents.final.bfloat16(), one.latents.condition)) for one in samples]
    with Running("drm_latents", noise_level=0.25, noise_seed=7, score_scale=2.0, score_bias=-1.0) as running:
        found = scores_of(running.reward(), half)
    (tensors,) = running.service.bodies
    assert sorted(tensors) == ["latents", "pooled_prompt_embeds", "prompt_embeds", "seeds", "u"]
    assert tensors["latents"].dtype == torch.bfloat16 and tensors["latents"].shape == (2, 3, 16, 16)
    assert torch.equal(tensors["latents"], torch.stack([one.latents.final for one in half]))
    assert torch.equal(tensors["prompt_embeds"], torch.stack([one.latents.condition["embeds"] for one in half]))
    assert torch.equal(tensors["pooled_prompt_embeds"], torch.stack([one.latents.condition["pooled"] for one in half]))
    assert torch.equal(tensors["u"], torch.tensor([0.25, 0.25])) and tensors["u"].dtype == torch.float32
    assert torch.equal(tensors["seeds"], torch.tensor([7, 7])) and tensors["seeds"].dtype == torch.int64
    ((_, _, headers, _),) = running.server.requests
    assert headers["x-drm-protocol-version"] == "1"
    for (value, details), picture in zip(found, running.service.pictures, strict=True):
        assert details == {"raw": pytest.approx(red(picture))} and value == pytest.approx(2 * red(picture) - 1)


def test_one_sample_per_request_and_no_seed_if_so_configured():
    with Running("drm_latents", samples_per_request=1, noise_seed=None) as running:
        scores_of(running.reward(), samples_of(3))
    assert [len(one["latents"]) for one in running.service.bodies] == [1, 1, 1]
    assert all("seeds" not in one for one in running.service.bodies)


def test_a_server_of_another_version_is_refused_and_not_asked_again():
    async def newer(request):
        return web.json_response({"protocol_version": "2", "raw_scores": [0.5, 0.5]})

    with Running("drm_latents") as running:
        running.fault = newer
        errors = asyncio.run(running.reward().score(samples_of(2)))
    assert all("protocol_version must be '1', got '2'" in str(error) for error in errors)
    assert len(running.server.requests) == 1


@pytest.mark.parametrize(
    "latents, says",
    [
        (None, "needs latents, which a picture from a file has not"),
        (
            SampleLatents(torch.zeros(16, 4, 2, 2), {"embeds": torch.zeros(3, 2)}),
            r"got \(16, 4, 2, 2\) and \['embeds'\]",
        ),
        (SampleLatents(torch.zeros(16, 2, 2), {"embeds": torch.zeros(3, 2)}), r"got \(16, 2, 2\) and \['embeds'\]"),
    ],
)
def test_a_sample_without_what_the_scorer_reads_is_refused(latents, says):
    sample = RewardInput(make_picture(16, 16), ROW, 0, latents=latents)
    with Running("drm_latents") as running, pytest.raises(ValueError, match=says):
        scores_of(running.reward(), [sample])
    assert not running.server.requests
