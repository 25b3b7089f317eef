# SPDX-License-Identifier: Apache-2.0
"""The HTTP API of a real replica, and the sockets that replicas listen on. Routes: tests/rollout/test_http_api.py."""

import base64
import io
import json
import threading
import urllib.error
import urllib.request

import numpy as np
import ray
from PIL import Image

from tests.vllm_omni.conftest import KEY, exposed_sockets, exposed_sockets_of_ray, listening_sockets, request
from verl_digen.loopback import is_loopback

BODY = {"prompt": "a red circle", "size": "64x64", "num_inference_steps": 40}


def call(replica, path, body=None, key=None):
    """Send a request -> (status, JSON or the header Retry-After)."""
    host, port = ray.get(replica.server.http_address.remote())
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"http://{host}:{port}{path}", data, headers), timeout=60
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Retry-After"]


def picture_of(answer):
    return Image.open(io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"])))


def test_a_replica_listens_on_nothing_but_loopback(full_replica):
    host, port = ray.get(full_replica.server.http_address.remote())
    assert (host, port) in listening_sockets(full_replica.server) and is_loopback(host)
    assert exposed_sockets(full_replica.server) == exposed_sockets_of_ray()


def test_without_the_api_a_replica_opens_no_port_at_all(lora_replica):
    assert ray.get(lora_replica.server.http_address.remote()) is None
    assert exposed_sockets(lora_replica.server) == exposed_sockets_of_ray()


def test_pictures_are_drawn_beside_training_for_those_with_the_key(full_replica):
    assert call(full_replica, "/v1/models")[0] == 401
    assert call(full_replica, "/v1/images/generations", BODY)[0] == 401
    assert call(full_replica, "/v1/omni/sleep", {}, KEY)[0] == 404
    assert call(full_replica, "/v1/models", key=KEY)[0] == 200
    sample = full_replica.submit(request(0))
    status, beside = call(full_replica, "/v1/images/generations", BODY | {"seed": 3}, KEY)
    assert status == 200
    assert ray.get(sample).trajectory.uid == "p0"
    status, answer = call(full_replica, "/v1/images/generations", BODY | {"seed": 3}, KEY)
    assert status == 200
    assert picture_of(answer).size == (64, 64)
    status, again = call(full_replica, "/v1/images/generations", BODY | {"seed": 3}, KEY)
    assert status == 200 and again["data"] == answer["data"]  # and another `created`, in seconds
    difference = np.asarray(picture_of(beside), dtype=int) - np.asarray(picture_of(answer), dtype=int)
    assert np.abs(difference).max() <= 1, "in a batch with a sample of training it may be rounded otherwise"


def test_sleep_during_a_request_loses_nothing_and_one_during_sleep_is_told_when_to_retry(full_replica):
    answers = []
    client = threading.Thread(
        target=lambda: answers.append(call(full_replica, "/v1/images/generations", BODY, KEY)), daemon=True
    )
    client.start()
    while not full_replica.health()["num_running"]:
        assert client.is_alive(), "it ended before it could be put to sleep"
    ray.get(full_replica.server.sleep.remote(), timeout=60)
    assert full_replica.health()["is_asleep"]
    client.join(timeout=60)
    assert answers[0][0] == 200
    status, retry_after_s = call(full_replica, "/v1/images/generations", BODY, KEY)
    assert status == 503 and int(retry_after_s) > 0
    ray.get(full_replica.server.wake_up.remote(), timeout=60)
    assert call(full_replica, "/v1/images/generations", BODY, KEY)[0] == 200
