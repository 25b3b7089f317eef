# SPDX-License-Identifier: Apache-2.0
"""The HTTP API of a replica: off unless asked for, on loopback, behind the key."""

import base64
import io
import json
import os
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest
import ray
from PIL import Image

from tests.vllm_omni.conftest import request, start_replica

KEY = "a secret"


def call(address, path, body=None, key=None):
    """(status, JSON) of a request."""
    host, port = address
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}{path}", data, headers), timeout=60
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, None


def test_no_port_is_open_unless_asked_for(full_replica):
    _, port = ray.get(full_replica.server.get_server_address.remote())
    assert port == "replica-0"


def test_it_listens_on_loopback_wants_the_key_and_draws_beside_training(ray_here, tiny_qwen_image, tmp_path):
    env = {}
    if find_spec("torchaudio") is None:  # the web server imports it for speech models; none is built for this PyTorch
        (tmp_path / "torchaudio").mkdir()
        for module in ("__init__", "functional", "transforms"):
            (tmp_path / "torchaudio" / f"{module}.py").write_text("def __getattr__(name): return None")
        env["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    replica = start_replica(
        tiny_qwen_image,
        2,
        "digen.rollout.http.enable=true",
        f"digen.rollout.http.api_key={KEY}",
        **env,
    )
    address = ray.get(replica.server.get_server_address.remote())
    assert address[0] == "127.0.0.1" and isinstance(address[1], int)
    assert call(address, "/v1/models")[0] == 401
    status, models = call(address, "/v1/models", key=KEY)
    assert status == 200 and models["data"]
    body = {"prompt": "a red circle", "size": "64x64", "n": 1, "num_inference_steps": 4}
    assert call(address, "/v1/images/generations", body)[0] == 401
    sample = replica.submit(request(0))
    status, answer = call(address, "/v1/images/generations", body, key=KEY)
    assert status == 200
    picture = Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))
    assert picture.size == (64, 64)
    assert ray.get(sample).trajectory.uid == "p0"


@pytest.mark.skipif(find_spec("torchaudio") is not None, reason="nothing is missing here")
def test_what_is_missing_for_it_is_named(ray_here, tiny_qwen_image):
    with pytest.raises(Exception, match=r"digen\.rollout\.http\.enable=true needs .*torchaudio is missing"):
        start_replica(tiny_qwen_image, 3, "digen.rollout.http.enable=true")
