# SPDX-License-Identifier: Apache-2.0
"""The HTTP API of a replica, as its clients see it, over a fake replica."""

from __future__ import annotations

import asyncio
import base64
import io

import httpx
import pytest
import torch
from PIL import Image

from verl_digen.config import DigenConfig, HttpConfig, RolloutConfig, SamplingConfig
from verl_digen.rollout.vllm_omni.http import build_app, read_key

KEY = "a secret"
PATH = "/v1/images/generations"
BODY = {"prompt": "a red circle"}
SERVED = {("GET", "/health"), ("GET", "/v1/models"), ("POST", PATH)}


class Replica:
    """Draws black pictures of the requested size and records the requests."""

    def __init__(self):
        self.requests = []
        self.is_awake = True
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.has_begun = asyncio.Event()

    async def draw(self, request):
        self.requests.append(request)
        self.has_begun.set()
        await self.may_finish.wait()
        if request.inputs.text == "too long":
            raise ValueError("the prompt has 2000 tokens, the encoder reads 512")
        geometry = request.sampling.geometry
        return torch.zeros(geometry.height_px, geometry.width_px, 3, dtype=torch.uint8)


def app_of(replica, *, key=None, **http):
    digen = DigenConfig(
        sampling=SamplingConfig(height_px=64, width_px=96, val_num_steps=20, val_true_cfg_scale=3.0),
        rollout=RolloutConfig(http=HttpConfig(enable=True, **http)),
    )
    return build_app(replica.draw, is_awake=lambda: replica.is_awake, name="tiny", digen=digen, key=key)


async def ask(app, method, path, *, key=None, host="127.0.0.1:8000", **more):
    headers = {"Host": host} | more.pop("headers", {})
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:8000") as client:
        return await client.request(method, path, headers=headers, **more)


def answer(app, method, path, **more):
    return asyncio.run(ask(app, method, path, **more))


def routes_of(app):
    """(method, path) of each route, websockets as ("WS", path)."""
    return {(method, route.path) for route in app._app.routes for method in getattr(route, "methods", {"WS"})}


ELSEWHERE = [
    ("POST", "/invocations"),
    ("POST", "/v1/omni/sleep"),
    ("POST", "/v1/omni/wakeup"),
    ("POST", "/v1/images/edits"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/scale_elastic_ep"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/videos"),
    ("GET", "/health/"),
    ("GET", "//health"),
    ("GET", "/v1/models/.."),
    ("GET", "/"),
]
"""Routes of vLLM's and vLLM-Omni's servers, FastAPI's own pages, and spellings close to a served path."""


def test_the_app_has_three_routes():
    assert routes_of(app_of(Replica())) == SERVED


@pytest.mark.parametrize(("method", "path"), ELSEWHERE)
def test_every_other_path_is_404_with_the_key_and_401_without(method, path):
    replica = Replica()
    app = app_of(replica, key=KEY)
    assert answer(app, method, path, key=KEY, json=BODY).status_code == 404
    assert answer(app, method, path, json=BODY).status_code == 401
    assert not replica.requests


@pytest.mark.parametrize(("method", "path"), sorted(SERVED))
@pytest.mark.parametrize("key", [None, "", "wrong", KEY[:-1], KEY + "x"], ids=repr)
def test_without_the_key_every_served_route_is_401(method, path, key):
    replica = Replica()
    refused = answer(app_of(replica, key=KEY), method, path, key=key, json=BODY)
    assert refused.status_code == 401 and KEY not in refused.text
    assert not replica.requests


@pytest.mark.parametrize("method", ["PUT", "DELETE", "PATCH", "GET", "OPTIONS"])
def test_pictures_are_drawn_by_post_alone_and_no_origin_is_welcome(method):
    refused = answer(app_of(Replica()), method, PATH, headers={"Origin": "http://elsewhere.example"})
    assert refused.status_code == 405
    assert not [name for name in refused.headers if name.startswith("access-control")]


def test_a_picture_is_a_validation_sample_of_the_policy():
    replica = Replica()
    drawn = answer(app_of(replica, key=KEY), "POST", PATH, key=KEY, json={**BODY, "n": 2, "seed": 7})
    assert drawn.status_code == 200
    pictures = [Image.open(io.BytesIO(base64.b64decode(item["b64_json"]))) for item in drawn.json()["data"]]
    assert [picture.size for picture in pictures] == [(96, 64), (96, 64)]
    first, second = replica.requests
    assert (first.uid, first.sample_index, second.sample_index) == ("http-7", 0, 1)
    assert first.window.sde_steps == () and first.sampling.geometry.num_frames == 1
    assert (first.sampling.num_steps, first.sampling.true_cfg_scale) == (20, 3.0)


def test_without_a_seed_no_two_requests_are_the_same_sample():
    replica = Replica()
    app = app_of(replica)
    for _ in range(2):
        assert answer(app, "POST", PATH, json=BODY).status_code == 200
    assert replica.requests[0].uid != replica.requests[1].uid


def test_it_says_which_model_and_that_it_is_well():
    app = app_of(Replica())
    assert answer(app, "GET", "/v1/models").json()["data"][0]["id"] == "tiny"
    assert answer(app, "GET", "/health").status_code == 200


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("size", "97x64", "size must be <= 96 (digen.rollout.http.max_size_px), got 97"),
        ("size", "64x97", "size must be <= 96 (digen.rollout.http.max_size_px), got 97"),
        ("num_inference_steps", 21, "num_inference_steps must be <= 20 (digen.rollout.http.max_steps), got 21"),
        ("n", 5, "n must be <= 4 (digen.rollout.http.max_images), got 5"),
    ],
)
def test_a_request_beyond_a_limit_is_400_with_the_limits_key(field, value, message):
    replica = Replica()
    refused = answer(app_of(replica), "POST", PATH, json={**BODY, field: value})
    assert (refused.status_code, refused.json()["detail"]) == (400, message)
    assert not replica.requests


def test_limits_can_be_set():
    replica = Replica()
    app = app_of(replica, max_size_px=128, max_steps=30, max_images=5)
    body = {**BODY, "size": "128x128", "num_inference_steps": 30, "n": 5}
    assert answer(app, "POST", PATH, json=body).status_code == 200
    assert len(replica.requests) == 5


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": ""},
        {"prompt": 3},
        {**BODY, "n": 0},
        {**BODY, "size": "0x64"},
        {**BODY, "size": "64"},
        {**BODY, "num_inference_steps": 1},
        {**BODY, "true_cfg_scale": 0.5},
        {**BODY, "response_format": "url"},
        {**BODY, "lora": {"path": "/etc"}},
        {**BODY, "url": "http://elsewhere.example"},
        [],
    ],
    ids=str,
)
def test_a_malformed_body_is_422_and_draws_nothing(body):
    replica = Replica()
    assert answer(app_of(replica), "POST", PATH, json=body).status_code == 422
    assert not replica.requests


def test_a_body_that_is_too_large_is_413_whether_it_says_its_size_or_not():
    app = app_of(Replica(), max_body_bytes=100)

    async def chunks():
        for _ in range(20):
            yield b" " * 10

    headers = {"Content-Type": "application/json"}
    assert answer(app, "POST", PATH, json={"prompt": "x" * 100}).status_code == 413
    assert answer(app, "POST", PATH, content=chunks(), headers=headers).status_code == 413
    assert answer(app, "POST", PATH, json=BODY).status_code == 200


def test_a_web_page_cannot_post_a_form_nor_come_by_a_name_of_its_own():
    replica = Replica()
    app = app_of(replica)
    assert answer(app, "POST", PATH, content=b'{"prompt": "x"}').status_code == 415
    form = {"Content-Type": "text/plain"}
    assert answer(app, "POST", PATH, content=b'{"prompt": "x"}', headers=form).status_code == 415
    for host in ("evil.example:8000", "127.0.0.1.evil.example", ""):
        assert answer(app, "POST", PATH, json=BODY, host=host).status_code == 421
    assert not replica.requests
    for host in ("localhost:8000", "127.0.0.1", "[::1]:8000"):
        assert answer(app, "GET", "/health", host=host).status_code == 200


def test_a_prompt_that_the_encoder_refuses_is_400_with_its_reason():
    refused = answer(app_of(Replica()), "POST", PATH, json={"prompt": "too long"})
    assert refused.status_code == 400 and "the encoder reads 512" in refused.json()["detail"]


@pytest.mark.parametrize(("method", "path"), [("POST", PATH), ("GET", "/health")])
def test_a_replica_that_sleeps_answers_503_with_a_time_to_retry(method, path):
    replica = Replica()
    app = app_of(replica)
    replica.is_awake = False
    refused = answer(app, method, path, json=BODY)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
    assert not replica.requests
    replica.is_awake = True
    assert answer(app, method, path, json=BODY).status_code == 200


def test_requests_beyond_the_limit_are_503_until_one_is_done():
    async def run():
        replica = Replica()
        replica.may_finish.clear()
        app = app_of(replica, max_requests=1)
        first = asyncio.ensure_future(ask(app, "POST", PATH, json=BODY))
        await replica.has_begun.wait()
        refused = await asyncio.wait_for(ask(app, "POST", PATH, json=BODY), 10)
        assert refused.status_code == 503 and "max_requests" in refused.json()["detail"]
        replica.may_finish.set()
        assert (await first).status_code == 200
        assert (await ask(app, "POST", PATH, json=BODY)).status_code == 200
        assert len(replica.requests) == 2

    asyncio.run(run())


def test_a_websocket_is_closed():
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "websocket.connect"}

    asyncio.run(app_of(Replica())({"type": "websocket", "path": "/v1/realtime", "headers": []}, receive, send))
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_the_key_comes_from_the_environment_and_is_in_no_message(monkeypatch):
    monkeypatch.setenv("POLICY_KEY", KEY)
    assert read_key("POLICY_KEY") == KEY
    assert read_key(None) is None
    for value in (None, ""):
        monkeypatch.delenv("POLICY_KEY") if value is None else monkeypatch.setenv("POLICY_KEY", value)
        with pytest.raises(ValueError, match=r"digen\.rollout\.http\.api_key_env .*POLICY_KEY is empty or not set"):
            read_key("POLICY_KEY")
        monkeypatch.setenv("POLICY_KEY", KEY)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "gpu-node-1", ""])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(ValueError, match=r"digen\.rollout\.http\.host must be a loopback address"):
        HttpConfig(enable=True, host=host)
    assert HttpConfig(enable=True, host=host, api_key_env="POLICY_KEY").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_a_loopback_address_needs_none(host):
    assert HttpConfig(enable=True, host=host).api_key_env is None


def test_a_run_of_videos_has_no_pictures_to_draw():
    with pytest.raises(
        ValueError, match=r"digen\.rollout\.http\.enable must be false with digen\.sampling\.num_frames"
    ):
        DigenConfig(sampling=SamplingConfig(num_frames=5), rollout=RolloutConfig(http=HttpConfig(enable=True)))
