# SPDX-License-Identifier: Apache-2.0
"""A thousand samples against servers that fail one request in ten."""

from __future__ import annotations

import asyncio
import io
import pickle
import random
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from PIL import Image

from tests.reward.servers.local import LocalServer
from tests.reward.servers.services import red
from tests.reward.servers.test_protocols import Running, error_500, half_an_answer, html, run, samples_of
from verl_digen.reward.scoring import ScoringError


async def without_number(request):
    return web.Response(body=pickle.dumps({"scores": [float("nan")] * 1000}))


async def busy(request):
    return web.Response(status=429, headers={"Retry-After": "0"})


FAULTS = (error_500, half_an_answer, html, without_number, busy)


def shade(number):
    """Grey value of sample `number`, so that a wrong order shows."""
    return number % 250


def test_a_thousand_samples_are_all_scored_with_one_request_in_ten_failing():
    rng = random.Random(1)
    num_faults = 0
    (row,) = {sample.row.uid: sample for sample in samples_of(1)}.values()
    samples = [
        replace(row, pixels=np.full((8, 8, 3), shade(number), np.uint8), sample_index=number) for number in range(1000)
    ]

    async def sometimes(request):
        nonlocal num_faults
        await asyncio.sleep(0.001)
        if rng.random() < 0.1:
            num_faults += 1
            return await rng.choice(FAULTS)(request)
        return None

    with Running("http_scorer", max_retries=4, cache_size=0) as one, LocalServer(one.handle) as other:
        one.fault = sometimes
        reward = one.reward(url=[one.server.url, other.url], max_concurrency=3, samples_per_request=5)
        found = run(reward, samples, max_batch_size=250)
        limits = one.server.max_in_flight, other.max_in_flight
        num_requests = len(one.server.requests) + len(other.requests)
    assert [round(score.value * 255) for score in found] == [shade(number) for number in range(1000)]
    calls = {score.call: None for score in found}
    assert sum(dict(call.counts)["retries"] for call in calls) == num_faults > 10
    assert num_requests == 200 + num_faults, "equal pictures of one batch are asked for once"
    assert max(limits) == 3


def test_samples_that_no_server_can_score_fail_and_are_counted_and_the_others_are_scored():
    samples = samples_of(200, size=8)
    bad = {3, 77, 78, 150}
    for number in bad:
        samples[number] = replace(samples[number], pixels=np.full((8, 8, 3), 255, np.uint8) - np.uint8(number % 4))

    async def poisoned(request):
        files = pickle.loads(await request.read())["images"]
        is_bad = any(np.asarray(Image.open(io.BytesIO(file))).min() > 250 for file in files)
        return web.Response(status=500, text="cannot") if is_bad else None

    with Running("http_scorer") as running:
        running.fault = poisoned
        found = run(running.reward(samples_per_request=10), samples, max_batch_size=100)
    assert {number for number, one in enumerate(found) if isinstance(one, ScoringError)} == bad
    hits = [dict(one.call.counts)["cache_hits"] for one in found if not isinstance(one, ScoringError)]
    assert max(hits) > 0, "requests that succeeded are not repeated"
    for number, one in enumerate(found):
        assert number in bad or one.value == pytest.approx(red(samples[number].pixels), abs=0.03)


@pytest.mark.parametrize("cache_size", [0, 100])
def test_scores_of_equal_pictures_and_prompts_are_kept(cache_size):
    samples = samples_of(4)
    with Running("http_scorer", cache_size=cache_size) as running:
        reward = running.reward()
        first, again = run(reward, samples, max_batch_size=4), run(reward, samples[::-1], max_batch_size=4)[::-1]
        other = [replace(one, row=replace(one.row, text="a cat")) for one in samples]
        run(reward, other, max_batch_size=4)
    assert [one.value for one in first] == [one.value for one in again]
    hits = dict(again[0].call.counts)["cache_hits"]
    assert (hits, len(running.server.requests)) == ((4, 2) if cache_size else (0, 3))
