# SPDX-License-Identifier: Apache-2.0
"""Every protocol against a server that speaks it: right answers, and every way to fail."""

import asyncio
import base64
import io
import json
import os
import pickle
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from aiohttp import web
from PIL import Image

from tests.reward.contract import check_contract, make_picture, make_samples, scores_of
from tests.reward.servers.local import RAN, LocalServer, refusing_url
from tests.reward.servers.services import SERVICES, red
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.reward.scoring import BatchScorer, ScoringError
from verl_digen.reward.servers.protocols import PROTOCOLS
from verl_digen.types import PromptRow, RewardInput

FAST = {"backoff_s": 0.001, "max_retries": 1}
ROW = PromptRow("a dog", "test", None, uid="g")
META = {"tag": "colors", "include": [{"class": "dog", "count": 1, "color": "red"}]}


class Running:
    """Context manager: a service of a protocol behind a server; `fault(request)` may answer in its place."""

    def __init__(self, protocol, **changed):
        settings, service, self.is_exact = SERVICES[protocol]
        self.service, self.fault = service(), None
        self.server = LocalServer(self.handle)
        self.settings = {"weight": 1.0, "reward": "server", "protocol": protocol, **FAST, **settings, **changed}

    async def handle(self, request):
        if self.fault is not None and (found := await self.fault(request)) is not None:
            return found
        return self.service.answer(request.path, await request.read())

    def __enter__(self):
        self.server.__enter__()
        return self

    def __exit__(self, *error):
        self.server.__exit__(*error)

    def reward(self, **changed):
        entry = reward_entry("mine", {"url": self.server.url, **self.settings, **changed})
        return make(entry, torch.device("cpu"))


def with_meta(samples):
    """Samples with the columns that some protocols need."""
    return [replace(sample, row=replace(sample.row, extra=META)) for sample in samples]


def samples_of(number, size=16):
    return with_meta(RewardInput(make_picture(size, size, seed=seed), ROW, seed) for seed in range(number))


def run(reward, samples, **changed):
    """Score samples as a pool does -> `PartScore`s or errors."""
    settings = {"max_retries": 1, "timeout_s": 60.0, "max_batch_size": 64, "batch_wait_s": 0.001}
    scorer = BatchScorer("mine", lambda: reward, **(settings | changed))

    async def all_of_them():
        return await asyncio.gather(*(scorer.score((sample,)) for sample in samples), return_exceptions=True)

    return [one if isinstance(one, BaseException) else one[0] for one in asyncio.run(all_of_them())]


def test_every_protocol_has_a_service_here():
    assert set(SERVICES) == set(PROTOCOLS)


@pytest.mark.parametrize(
    "protocol",
    ["http_scorer", *(pytest.param(name, marks=pytest.mark.long) for name in SERVICES if name != "http_scorer")],
)
def test_a_protocol_passes_the_contract_of_scorers(protocol):
    with Running(protocol) as running:
        check_contract(running.reward(), with_meta(make_samples()), abs_tol=1e-6)


@pytest.mark.parametrize("protocol", SERVICES)
def test_scores_are_those_of_the_pixels_that_were_sent_in_order(protocol):
    samples = with_meta(make_samples())
    with Running(protocol) as running:
        found = scores_of(running.reward(), samples)
    tolerance = 1e-12 if running.is_exact else 0.02
    assert [value for value, _ in found] == pytest.approx([red(one.pixels) for one in samples], abs=tolerance)
    sent = {one.pixels.shape: one.pixels for one in samples}
    assert len(running.service.pictures) == len(samples)
    for picture in running.service.pictures:
        if running.is_exact:
            assert np.array_equal(picture, sent[picture.shape])
        else:  # exactly what JPEG makes of it
            file = io.BytesIO()
            Image.fromarray(sent[picture.shape]).save(file, "JPEG", quality=75)
            assert np.array_equal(picture, np.asarray(Image.open(file)))
    if protocol != "flow_grpo_deqa":
        assert sorted(running.service.prompts) == sorted(one.row.text for one in samples)


@pytest.mark.parametrize("protocol", SERVICES)
def test_a_video_is_the_mean_of_its_frames_or_sent_whole(protocol):
    pixels = np.concatenate([make_picture(16, 16, seed=seed, frames=1) for seed in range(5)])
    sample = with_meta([RewardInput(pixels, ROW, 0)])[0]
    with Running(protocol) as running:
        ((value, _),) = scores_of(running.reward(max_frames=3), [sample])
    chosen = pixels if protocol == "flow_factory" else pixels[[0, 2, 4]]
    assert len(running.service.pictures) == len(chosen)
    assert value == pytest.approx(red(chosen), abs=1e-12 if running.is_exact else 0.02)


async def half_an_answer(request):
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"half")
    request.transport.close()
    return response


async def html(request):
    return web.Response(text="<html>502 Bad Gateway</html>", content_type="text/html")


async def nothing(request):
    return web.Response(body=b"")


async def silence(request):
    await asyncio.Event().wait()


class Evil:
    def __reduce__(self):
        return os.system, (f"touch {RAN}",)


async def evil_pickle(request):
    return web.Response(body=pickle.dumps({"scores": [Evil()], "outputs": [Evil()]}))


FAULTS = {
    "half": (half_an_answer, "broke off"),
    "html": (html, "cannot be used.*502 Bad Gateway"),
    "empty": (nothing, "cannot be used.*0 bytes"),
    "silence": (silence, "nothing came within read_timeout_s=0.05"),
    "code": (evil_pickle, "wants posix.system|no JSON"),
}


@pytest.mark.parametrize(
    ("protocol", "fault"),
    [
        *((name, fault) for name in SERVICES for fault in ("html", "code")),
        *(("flow_factory", fault) for fault in ("half", "empty", "silence")),
    ],
)
def test_a_fault_fails_the_samples_with_what_came_and_is_never_a_score(protocol, fault):
    handler, says = FAULTS[fault]
    with Running(protocol) as running:
        running.fault = handler
        limit = {"read_timeout_s": 0.05} if fault == "silence" else {}  # a slow core may take longer to answer
        found = run(running.reward(**limit), samples_of(2), max_retries=0)
    assert all(isinstance(one, ScoringError) for one in found)
    for one in found:
        assert_matches(one, says)
    assert not RAN.exists()


def assert_matches(error, says):
    assert re.search(says, str(error), re.DOTALL), str(error)


@pytest.mark.parametrize("protocol", SERVICES)
def test_a_refused_connection_is_tried_again_and_then_fails_the_batch_as_a_whole(protocol):
    with Running(protocol, max_retries=3) as running:
        reward = running.reward(url=refusing_url())
        found = run(reward, samples_of(20), max_retries=2)
    assert all(isinstance(one, ScoringError) and "no connection" in str(one) for one in found)
    assert reward.take_counts()["retries"] == 3 * 3, "three calls of four attempts, whatever the batch"


WRONG = (
    ([0.5], "one entry per sample, got 1 for 2"),
    ([0.5, "high"], r"\[1\] must be a number, got 'high'"),
    ([None, 0.5], r"\[0\] must be a number, got None"),
    ([0.5, float("nan")], "NaN, which is no number of JSON|finite number, got nan"),
    ([float("inf"), 0.5], "Infinity, which is no number of JSON|finite number, got inf"),
    (0.5, "must be a list, got 0.5"),
)


def answer_with(protocol, values):
    """The protocol's answer with these scores."""
    if protocol in ("flow_grpo_geneval", "http_scorer"):
        more = {"strict_rewards": [0.0, 0.0], "rewards": [0.0, 0.0]}
        return web.Response(body=pickle.dumps({"scores": values, **more}))
    if protocol in ("flow_grpo_deqa", "unified_reward_remote"):
        return web.Response(body=pickle.dumps({"outputs": values}))
    return web.json_response({"rewards": values})


@pytest.mark.parametrize("protocol", SERVICES)
def test_scores_that_are_none_fail_and_are_named(protocol):
    async def fault(values, request):
        return answer_with(protocol, values)

    with Running(protocol, max_retries=0) as running:
        for values, says in WRONG:
            running.fault = partial(fault, values)
            for error in asyncio.run(running.reward().score(samples_of(2))):
                assert isinstance(error, RuntimeError)
                assert_matches(error, says)


def test_geneval_gives_the_rules_as_details_and_needs_its_columns():
    with Running("flow_grpo_geneval") as running:
        ((value, details),) = scores_of(running.reward(only_strict=False), samples_of(1))
        assert details == {
            **{"strict_accuracy": float(value > 0.5), "strict_accuracy/colors": float(value > 0.5)},
            **{"accuracy": float(value > 0.25), "accuracy/colors": float(value > 0.25)},
        }
        ((_, details),) = scores_of(running.reward(only_strict=True), samples_of(1))
        assert set(details) == {"strict_accuracy", "strict_accuracy/colors"}
        (error,) = asyncio.run(running.reward().score(make_samples()[:1]))
        assert_matches(error, "columns tag and include, got 'a red square' without tag and include")


def test_http_scorer_sends_metadata_and_gives_further_lists_as_details():
    with Running("http_scorer", metadata={"only_strict": True}, sends_rows=True) as running:
        ((value, details),) = scores_of(running.reward(), samples_of(1))
    (sent,) = (pickle.loads(body) for *_, body in running.server.requests)
    assert sent["metadata"] == {"only_strict": True, "meta_datas": [{**META, "prompt": "a dog"}]}
    assert details == {"twice": pytest.approx(2 * value)}


@pytest.mark.parametrize("protocol", ["http_scorer", "flow_factory"])
def test_an_error_that_the_server_tells_is_told_and_not_asked_for_again(protocol):
    told = {
        "http_scorer": pickle.dumps({"error": "Traceback: no such object"}),
        "flow_factory": json.dumps({"error": "no such object"}).encode(),
    }[protocol]

    async def fault(request):
        return web.Response(body=told)

    with Running(protocol) as running:
        running.fault = fault
        for error in asyncio.run(running.reward().score(samples_of(2))):
            assert isinstance(error, RuntimeError)
            assert_matches(error, r"server declined: .*no such object")
    assert len(running.server.requests) == 1


def test_flow_factory_takes_a_bare_list_and_sends_the_prompts_images(tmp_path):
    pictures = [make_picture(16, 16, seed=seed) for seed in (5, 6)]
    paths = tuple(str(tmp_path / f"{number}.png") for number in range(2))
    for path, pixels in zip(paths, pictures, strict=True):
        Image.fromarray(pixels).save(path)

    async def bare(request):
        return web.json_response([0.25] * len(json.loads(await request.read())["prompt"]))

    plain, edited = samples_of(2)
    edited = replace(edited, row=replace(edited.row, images=paths))
    with Running("flow_factory", extra={"mode": "edit"}) as running:
        running.fault = bare
        assert [value for value, _ in scores_of(running.reward(), [plain, edited, plain])] == [0.25] * 3
    bodies = sorted((json.loads(body) for *_, body in running.server.requests), key=lambda body: len(body["prompt"]))
    assert [body["condition_images"] is None for body in bodies] == [False, True] or len(bodies) == 2
    (conditions,) = next(body["condition_images"] for body in bodies if body["condition_images"])
    for file, pixels in zip(conditions, pictures, strict=True):
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(file)))), pixels)
    assert all(body["extra"] == {"mode": "edit"} for body in bodies)


def test_samples_that_no_server_can_score_fail_alone_and_the_others_keep_their_scores():
    samples = samples_of(200, size=8)
    bad = {3, 77, 78, 150}
    for number in bad:
        samples[number] = replace(samples[number], pixels=np.full((8, 8, 3), 255, np.uint8) - np.uint8(number % 4))

    async def poisoned(request):
        files = pickle.loads(await request.read())["images"]
        is_bad = any(np.asarray(Image.open(io.BytesIO(file))).min() > 250 for file in files)
        return web.Response(status=500, text="cannot") if is_bad else None

    with Running("http_scorer", max_retries=0) as running:
        running.fault = poisoned
        found = run(running.reward(samples_per_request=10), samples, max_batch_size=100)
    assert {number for number, one in enumerate(found) if isinstance(one, ScoringError)} == bad
    assert len(running.server.requests) == 20 + 30, "each sample of the three requests that failed, once more"
    for number, one in enumerate(found):
        assert number in bad or one.value == pytest.approx(red(samples[number].pixels), abs=0.03)


OWN = """
from verl_digen.reward.servers.answers import HttpRequest
from verl_digen.reward.servers.protocol import Protocol
from verl_digen.reward.servers.protocols.http_scorer import HttpScorer


class Mine(HttpScorer):
    pass


class Deaf(Protocol):
    def request(self, batch):
        return HttpRequest("", b"")


class Rowless(HttpScorer):
    def check_row(self, row):
        raise ValueError
"""


def test_a_protocol_of_ones_own_is_a_class_in_a_file(tmp_path):
    file = tmp_path / "own_protocol.py"
    file.write_text(OWN)
    samples = samples_of(3)
    with Running("http_scorer") as running:
        found = run(running.reward(protocol=f"{file}:Mine"), samples)
    assert [one.value for one in found] == pytest.approx([red(one.pixels) for one in samples], abs=0.03)
    given = {"weight": 1.0, "reward": "server", "url": "http://host"}
    for name, told in {
        "Deaf": r"class of Protocol with read\(self, answer, batch\), got 'Deaf' \(TypeError: it has none",
        "Rowless": r"class of Protocol with class method check_row\(row\), got 'Rowless'",
        "HttpRequest": "class of verl_digen.reward.servers.protocol.Protocol, got <class",
        "None_": "name what can be loaded, got .*:None_",
    }.items():
        with pytest.raises(ValueError, match=rf"mine\.protocol must (be a |){told}"):
            make(reward_entry("mine", {**given, "protocol": f"{file}:{name}"}), torch.device("cpu"))


@pytest.mark.parametrize(
    "changed, says",
    [
        ({"protocol": "flow_grpo_genevl"}, "mine.protocol must be one of .*did you mean flow_grpo_geneval"),
        ({"url": ""}, "mine: url must be a URL or a list of URLs"),
        ({"url": "host:1"}, "mine: url must begin with http"),
        ({"only_strict": True}, r"mine.only_strict must be a setting of ServerReward \(.*jpeg_quality"),
        ({"max_retries": "many"}, "mine.max_retries must have a value of its type"),
    ],
)
def test_a_wrong_setting_is_told_with_its_key(changed, says):
    given = {"weight": 1.0, "reward": "server", "protocol": "http_scorer", "url": "http://host", **changed}
    with pytest.raises(ValueError, match=says):
        make(reward_entry("mine", given), torch.device("cpu"))
