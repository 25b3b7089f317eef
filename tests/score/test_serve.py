# SPDX-License-Identifier: Apache-2.0
"""`digen serve-reward`: the form of UniRL's service, with a token, limits, and errors per sample."""

import asyncio
import base64
import io
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from argparse import Namespace

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from tests.reward.contract import make_picture
from verl_digen.config.reward import reward_entry
from verl_digen.reward import pool_worker
from verl_digen.reward.scorers import jpeg_compressibility
from verl_digen.score.app import ServerLimits, make_app
from verl_digen.score.rewards import LocalRewards
from verl_digen.score.serve_command import run, token_of
from verl_digen.score.unirl import Limits

OWN = """
from PIL import Image

def about(data_source, solution_image, ground_truth, extra_info=None):
    if extra_info["prompt"] == "bad":
        raise ValueError("not this one")
    sources = [Image.open(path).size for path in extra_info["images"]]
    return {"score": len(extra_info["prompt"]), "sources": len(sources), "truth": len(ground_truth), **tag(extra_info)}


def tag(extra_info):
    return {"tag": extra_info["tag"]} if "tag" in extra_info else {}
"""
JPEG = "jpeg_compressibility"
START = "import sys; from verl_digen.cli import main; sys.exit(main())"


def encoded(pixels, format="PNG") -> str:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=format)
    return base64.b64encode(buffer.getvalue()).decode()


def request(pixels=None, text="a cat", rewards=(JPEG,), earlier=(), **more) -> dict:
    turn = {"text": text, "image_b64": encoded(make_picture() if pixels is None else pixels)}
    return {"history": [*earlier, turn], "required_rewards": list(rewards), **more}


@pytest.fixture
def served(tmp_path):
    """`served(requests, ...)` -> (status, JSON) of one POST /score to a server with two rewards."""
    (tmp_path / "mine.py").write_text(OWN)
    about = reward_entry("about", {"weight": 1.0, "reward": f"{tmp_path / 'mine.py'}:about"})
    rewards = LocalRewards([reward_entry(JPEG, 1.0), about], torch.device("cpu"), max_retries=0, timeout_s=10.0)

    def ask(
        *requests, token="secret", sent="Bearer secret", body=None, max_body=10**7, most=100, max_px=10**6, root=None
    ):
        limits = ServerLimits(Limits(max_px, root), max_body, most)

        async def call():
            transport = httpx.ASGITransport(make_app(rewards, limits, token))
            async with httpx.AsyncClient(transport=transport, base_url="http://served") as client:
                kwargs = {"json": {"requests": list(requests)}} if body is None else {"content": body}
                answer = await client.post("/score", headers={"Authorization": sent}, **kwargs)
                return answer.status_code, answer.json()

        return asyncio.run(call())

    return ask


def test_scores_and_details_come_in_the_services_form(served):
    pictures = [make_picture(seed=seed) for seed in range(3)]
    earlier = [{"text": "source", "image_b64": encoded(make_picture(32, 48))}]
    requests = [request(pixels) for pixels in pictures[:2]]
    requests.append(
        request(pictures[2], "edit it", [JPEG, "about"], earlier, metadata={"ground_truth": "four", "tag": 3})
    )
    status, answer = served(*requests)
    expected = [jpeg_compressibility.compute_score("x", pixels, None) for pixels in pictures]
    assert status == 200 and answer["errors"] == [{}, {}, {}]
    assert [result[JPEG][JPEG] for result in answer["results"]] == pytest.approx(expected)
    assert answer["results"][2]["about"] == {"about": 7.0, "sources": 1.0, "truth": 4.0, "tag": 3.0}


def test_a_sample_that_fails_has_an_error_and_no_score(served):
    broken = {"history": [{"text": "x", "image_b64": "!"}], "required_rewards": [JPEG]}
    status, answer = served(request(), broken, request(text="bad", rewards=[JPEG, "about"]))
    assert status == 200 and list(answer["results"][0]) == [JPEG] and answer["results"][1] == {}
    assert "history[0].image_b64 must be base64" in answer["errors"][1][JPEG]
    assert list(answer["results"][2]) == [JPEG] and "not this one" in answer["errors"][2]["about"]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"text": "x"}, "must have one of image_b64, video_b64 and video_path, got none"),
        ({"text": "x", "image_b64": "AAAA", "video_b64": "AAAA"}, "must have one of"),
        ({"text": "x", "image_b64": base64.b64encode(b"no picture").decode()}, "a picture that Pillow reads"),
        ({"text": "x", "image_b64": encoded(np.zeros((1001, 1000, 3), np.uint8))}, "at most 1000000 pixels"),
        ({"text": "x", "video_path": "/etc/passwd"}, "this server reads no files"),
        ({"text": "x", "video_b64": base64.b64encode(b"no film").decode()}, "cannot be read"),
    ],
    ids=["none", "two", "garbage", "large", "path", "film"],
)
def test_a_picture_that_cannot_be_scored_fails_alone(served, turn, message):
    status, answer = served({"history": [turn], "required_rewards": [JPEG]}, request())
    assert status == 200 and message in answer["errors"][0][JPEG]
    assert answer["results"][1][JPEG][JPEG] < 0


def test_paths_of_videos_stay_in_their_folder(served, tmp_path):
    root = tmp_path / "videos"
    root.mkdir()
    frames = np.stack([make_picture(32, 32, seed=seed) for seed in range(2)])
    np.save(root / "a.npy", frames)
    np.save(tmp_path / "b.npy", frames)
    (root / "link.npy").symlink_to(tmp_path / "b.npy")
    paths = [root / "a.npy", root / ".." / "b.npy", root / "link.npy"]
    asked = [{"history": [{"text": "x", "video_path": str(path)}], "required_rewards": [JPEG]} for path in paths]
    _, answer = served(*asked, root=root)
    assert answer["results"][0][JPEG][JPEG] == pytest.approx(jpeg_compressibility.compute_score("x", frames, None))
    assert [list(errors) for errors in answer["errors"]] == [[], [JPEG], [JPEG]]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        ({"sent": "Bearer other"}, 401, "token"),
        ({"sent": ""}, 401, "token"),
        ({"max_body": 100}, 413, "at most 100 bytes"),
        ({"most": 1}, 503, "at most 1 may be"),
        ({"body": b"{"}, 400, "Invalid JSON"),
        ({"body": b'{"requests": [{"history": []}]}'}, 400, r"requests.0.history: "),
        ({"body": b'{"requests": [{"history": [{"text": 1}], "required_rewards": ["x"]}]}'}, 400, "history.0.text"),
        ({"token": None, "sent": ""}, 200, None),
    ],
)
def test_what_is_not_allowed_is_refused_as_a_whole(served, options, status, message):
    found, answer = served(request(), request(), **options)
    assert found == status and (message is None or message in answer["detail"])


def test_a_reward_that_is_not_served_is_named(served):
    status, answer = served(request(rewards=["pickscore"]))
    assert status == 400 and answer["detail"].endswith(f"must be among {JPEG}, about, got 'pickscore'")


def test_requests_share_calls(served, monkeypatch):
    sizes, call = [], pool_worker.BatchScorer._call

    async def counted(self, samples, num_queued):
        sizes.append(len(samples))
        return await call(self, samples, num_queued)

    monkeypatch.setattr(pool_worker.BatchScorer, "_call", counted)
    status, _ = served(*[request() for _ in range(20)])
    assert status == 200 and sum(sizes) == 20 and len(sizes) == 3, "ceil(20 / max_batch_size=8)"


def args(**changes) -> Namespace:
    given = {"host": "127.0.0.1", "token_env": "DIGEN_TEST_TOKEN", "no_token": False}
    return Namespace(**(given | changes))


def test_an_open_port_needs_a_token(monkeypatch):
    monkeypatch.delenv("DIGEN_TEST_TOKEN", raising=False)
    assert token_of(args()) is None and token_of(args(host="0.0.0.0", no_token=True)) is None
    with pytest.raises(ValueError, match=r"DIGEN_TEST_TOKEN must hold a token .*got '0\.0\.0\.0'"):
        token_of(args(host="0.0.0.0"))
    monkeypatch.setenv("DIGEN_TEST_TOKEN", "secret")
    assert token_of(args(host="0.0.0.0")) == "secret"
    with pytest.raises(ValueError, match="--no-token excludes"):
        token_of(args(no_token=True))


def test_a_reward_of_groups_is_not_served(capsys):
    given = {"reward": "diversity", "port": 0, "video_root": None, "device": "cpu", "max_retries": 0, "timeout_s": 1.0}
    assert run(args(**given)) == 2
    assert "must score single samples" in capsys.readouterr().err


def test_the_command_serves_until_it_is_told_to_stop(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", START, "serve-reward", JPEG, "--port", str(port), "--device", "cpu"]
    with subprocess.Popen(
        command, env={**os.environ, "DIGEN_REWARD_TOKEN": "secret"}, stderr=subprocess.PIPE
    ) as server:
        try:
            assert server.stderr is not None
            while b"serving" not in (line := server.stderr.readline()):
                assert line, "it ended"
            assert b"ready" in _get(f"http://127.0.0.1:{port}/health")
            with pytest.raises(urllib.error.HTTPError, match="401"):
                _get(f"http://127.0.0.1:{port}/rewards")
        finally:
            server.send_signal(signal.SIGTERM)
        assert server.wait(30) == 0


def _get(url: str) -> bytes:
    """The answer, asked for until the port is open; at most 10 s."""
    deadline = time.monotonic() + 10
    while True:
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return answer.read()
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
