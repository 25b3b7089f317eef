# SPDX-License-Identifier: Apache-2.0
import asyncio
import logging
import random
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime
from math import inf, nan

import numpy as np
import pytest
from aiohttp import web

from tests.reward.servers.local import LocalServer, refusing_url
from verl_digen.reward.base import RewardUnavailable
from verl_digen.reward.servers.answers import Failed, Refused, Unreachable, UnusableAnswer, retry_after_s
from verl_digen.reward.servers.cache import AnswerCache, content_key
from verl_digen.reward.servers.client import ServerClient
from verl_digen.reward.servers.settings import ServerSettings

LOGGER = "verl_digen.reward.servers.client"
FAST = {"backoff_s": 0.001, "max_backoff_s": 0.002, "breaker_cool_down_s": 0.01, "max_retries": 3}


def client_of(*urls, **changed):
    return ServerClient(ServerSettings(url=list(urls), **(FAST | changed)), "reward server", rng=random.Random(0))


def ask(client, *, times=1, read=None, **options):
    """Post the number of each call at the same time -> results or errors, in order."""
    if read is not None:
        options["read"] = read

    async def run():
        calls = [
            client.post("/score", str(number).encode(), content_type="text/plain", **options) for number in range(times)
        ]
        found = await asyncio.gather(*calls, return_exceptions=True)
        await client.close()
        return found

    found = asyncio.run(run())
    return found if times > 1 else found[0]


def statuses(*sequence, **headers):
    """Handler that answers with these statuses, the last one forever."""
    left = list(sequence)

    async def handler(request):
        status = left.pop(0) if len(left) > 1 else left[0]
        return web.Response(status=status, text=f"status {status}", headers=headers)

    return handler


def test_a_request_arrives_as_it_was_sent_and_its_answer_comes_back():
    async def handler(request):
        return web.Response(body=b"\x00" + await request.read(), content_type="application/x-thing")

    with LocalServer(handler) as server:
        answer = ask(client_of(server.url + "/"), headers={"x-more": "1"})
    ((method, path, headers, body),) = server.requests
    assert (method, path, body) == ("POST", "/score", b"0")
    assert headers["Content-Type"] == "text/plain" and headers["x-more"] == "1" and "Authorization" not in headers
    assert (answer.status, answer.body, answer.content_type) == (200, b"\x000", "application/x-thing")
    assert answer.url == server.url


@pytest.mark.parametrize("status", [500, 502, 503, 429])
def test_failures_of_the_server_are_retried_and_counted(status):
    with LocalServer(statuses(status, status, 200)) as server:
        client = client_of(server.url)
        assert ask(client).body == b"status 200"
    assert len(server.requests) == 3
    assert client.take_counts() == {"retries": 2, "breaker_openings": 0, "cache_hits": 0}
    assert client.take_counts()["retries"] == 0


@pytest.mark.parametrize("status, for_all", [(400, False), (413, False), (422, False), (401, True), (404, True)])
def test_a_refusal_is_not_retried_and_says_what_came(status, for_all):
    with LocalServer(statuses(status, 200)) as server:
        error = ask(client_of(server.url))
    assert isinstance(error, Refused) and isinstance(error, RewardUnavailable) == for_all
    assert f"{server.url}/score: status {status}" in str(error) and f"'status {status}'" in str(error)
    assert len(server.requests) == 1


def test_a_redirect_is_not_followed():
    with LocalServer(statuses(302, 200, Location="http://127.0.0.1:1/")) as server:
        error = ask(client_of(server.url))
    assert isinstance(error, Refused) and "name the new address" in str(error) and len(server.requests) == 1


def test_after_all_retries_the_last_error_is_raised_with_their_number():
    with LocalServer(statuses(500)) as server:
        error = ask(client_of(server.url))
    assert isinstance(error, Failed) and not isinstance(error, RewardUnavailable)
    assert "status 500" in str(error) and "4 of 4 attempts" in str(error) and len(server.requests) == 4


def test_a_refused_connection_is_retried_and_then_concerns_all_samples():
    client = client_of(refusing_url())
    error = ask(client)
    assert isinstance(error, Unreachable) and isinstance(error, RewardUnavailable)
    assert "no connection" in str(error) and client.take_counts()["retries"] == 3


def test_a_retry_prefers_a_server_that_has_not_just_failed_the_request():
    with LocalServer(statuses(500)) as bad, LocalServer(statuses(200)) as good:
        client = client_of(bad.url, good.url, max_retries=1)
        ask(client, times=6, only=good.url)  # so that the bad one is the less used
        assert ask(client).url == good.url
    assert len(bad.requests) == 1


def test_an_answer_that_cannot_be_read_is_retried_and_its_beginning_shown():
    async def handler(request):
        good = len(server.requests) == 2
        return web.Response(text="0.5" if good else "<html>no such thing", content_type="text/html")

    def number(answer):
        try:
            return float(answer.body)
        except ValueError as error:
            raise UnusableAnswer("it is no number") from error

    with LocalServer(handler) as server:
        assert ask(client_of(server.url), read=number) == 0.5
        error = ask(client_of(server.url), read=number)
    assert "it is no number" in str(error) and "text/html, 19 bytes: '<html>no such thing'" in str(error)


def test_a_defect_of_the_reader_is_no_fault_of_the_server():
    def broken(answer):
        raise TypeError("defect")

    with LocalServer(statuses(200)) as server:
        client = client_of(server.url, max_concurrency=1)
        assert all(isinstance(error, TypeError) for error in ask(client, times=3, read=broken))
    assert len(server.requests) == 3 and client.take_counts()["retries"] == 0


def test_half_an_answer_is_retried():
    async def handler(request):
        response = web.StreamResponse(headers={"Content-Length": "100"})
        await response.prepare(request)
        await response.write(b"half")
        request.transport.close()
        return response

    with LocalServer(handler) as server:
        error = ask(client_of(server.url))
    assert isinstance(error, Failed) and "broke off" in str(error) and len(server.requests) == 4


def test_an_answer_that_is_too_large_is_refused_before_it_fills_the_memory():
    async def handler(request):
        response = web.StreamResponse()
        response.enable_compression()
        await response.prepare(request)
        for _ in range(100):
            await response.write(bytes(100_000))
        return response

    with LocalServer(handler) as server:
        error = ask(client_of(server.url, max_answer_mb=0.2, max_retries=0))
    assert "larger than max_answer_mb=0.2" in str(error)


def test_a_silent_server_runs_into_the_read_timeout():
    async def handler(request):
        await asyncio.Event().wait()

    with LocalServer(handler) as server:
        client = client_of(server.url, read_timeout_s=0.05, max_retries=1)
        error = ask(client)
    assert "nothing came within read_timeout_s=0.05" in str(error) and client.take_counts()["retries"] == 1


def test_a_server_that_dribbles_runs_into_the_total_timeout():
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x")
            await asyncio.sleep(0.005)

    with LocalServer(handler) as server:
        error = ask(client_of(server.url, timeout_s=0.05))
    assert isinstance(error, Failed) and "no usable answer within timeout_s=0.05" in str(error)


@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_moves_requests_to_another_url_and_opens_no_breaker(status):
    with LocalServer(statuses(status, **{"Retry-After": "3600"})) as busy, LocalServer(statuses(200)) as free:
        client = client_of(busy.url, free.url, breaker_failures=1)
        assert all(answer.url == free.url for answer in ask(client, times=20))
    assert 1 <= len(busy.requests) <= 4, "those that had started before the first answer"
    assert client.take_counts()["breaker_openings"] == 0


def test_retry_after_of_the_only_url_is_waited_for_up_to_the_total_timeout(caplog):
    async def run():
        loop, asked = asyncio.get_running_loop(), asyncio.create_task(client.get("/score"))
        while "status 429" not in caplog.text:
            assert not asked.done()
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # later than the wait before the retry, so that only the pause is left
        now_s = loop.time
        loop.time = lambda: now_s() + 600.0
        with pytest.raises(Failed, match=r"within timeout_s=600.*status 429"):
            await asked
        await client.close()

    with LocalServer(statuses(429, **{"Retry-After": "3600"})) as server, caplog.at_level(logging.DEBUG, LOGGER):
        client = client_of(server.url, timeout_s=600.0)
        asyncio.run(run())
    assert len(server.requests) == 1


def test_retry_after_is_a_number_or_a_date():
    now = datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert retry_after_s("7", now) == 7
    assert retry_after_s(format_datetime(now + timedelta(seconds=90), usegmt=True), now) == 90
    assert retry_after_s(format_datetime(now - timedelta(seconds=90)), now) == 0
    assert retry_after_s("soon", now) is None and retry_after_s(None, now) is None


def test_requests_in_flight_never_exceed_the_limit_of_a_url():
    async def handler(request):
        while min(one.max_in_flight, other.max_in_flight) < 3:
            await asyncio.sleep(0.001)
        return web.Response(text="ok")

    with LocalServer(handler) as one, LocalServer(handler) as other:
        assert all(answer.status == 200 for answer in ask(client_of(one.url, other.url, max_concurrency=3), times=60))
    assert one.max_in_flight == other.max_in_flight == 3 and len(one.requests) + len(other.requests) == 60


def test_connections_are_reused():
    ports = set()

    async def handler(request):
        ports.add(request.transport.get_extra_info("peername")[1])
        return web.Response(text="ok")

    with LocalServer(handler) as server:
        ask(client_of(server.url, max_concurrency=2), times=30)
    assert len(ports) == 2


def test_a_client_works_in_one_event_loop_after_another():
    with LocalServer(statuses(200)) as server:
        client = client_of(server.url)
        for _ in range(3):
            assert asyncio.run(client.get("/ping")).status == 200


def test_a_cancelled_call_frees_its_place():
    async def handler(request):
        if len(server.requests) == 1:
            await asyncio.Event().wait()
        return web.Response(text="ok")

    async def run():
        call = asyncio.create_task(client.get("/a"))
        while not server.requests:
            await asyncio.sleep(0.001)
        call.cancel()
        answer = await client.get("/b")
        await client.close()
        return answer

    with LocalServer(handler) as server:
        client = client_of(server.url, max_concurrency=1)
        assert asyncio.run(run()).body == b"ok"


def test_a_token_goes_into_the_header_and_into_no_message(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_TOKEN", " s3cret-token ")

    async def handler(request):
        return web.Response(status=500, text=f"bad header {request.headers['Authorization']} " + "x" * 300)

    def echoing(answer):
        raise UnusableAnswer("s3cret-token")

    with LocalServer(handler) as server, caplog.at_level(logging.DEBUG):
        client = client_of(server.url, token_env="JUDGE_TOKEN", breaker_failures=2)
        error = ask(client)
    assert server.requests[0][2]["Authorization"] == "Bearer s3cret-token"
    assert "Bearer ***" in str(error) and "s3cret" not in str(error) + repr(error.__cause__) + caplog.text
    with LocalServer(statuses(200)) as server:
        error = ask(client_of(server.url, token_env="JUDGE_TOKEN"), read=echoing)
    assert "s3cret" not in str(error) and error.__cause__.__cause__ is None


@pytest.mark.parametrize("value", [None, "", "two words", "line\nbreak", "é"])
def test_a_token_that_is_not_there_or_cannot_be_one_is_said_without_it(monkeypatch, value):
    monkeypatch.delenv("JUDGE_TOKEN", raising=False)
    if value is not None:
        monkeypatch.setenv("JUDGE_TOKEN", value)
    with pytest.raises(ValueError, match="token_env must name an environment variable") as raised:
        client_of("http://host", token_env="JUDGE_TOKEN")
    assert not value or value not in str(raised.value)


@pytest.mark.parametrize(
    "url, says",
    [
        ("", "url must be a URL or a list"),
        ("host:18085", "must begin with http:// or https://"),
        ("http://", "must name a host"),
        ("http://host:99999", "cannot be read"),
        ("http://host:0", "port in"),
        ("http://user:hunter2@host", "must not hold a user or a password"),
        ("http://host?key=1", "must end before"),
        ("http://ho st", "plain characters"),
        (["http://a", "http://a/"], "each server once"),
        ([5], "must hold URLs"),
    ],
)
def test_a_url_that_is_none_is_refused_with_the_rule(url, says):
    with pytest.raises(ValueError, match=says) as raised:
        ServerSettings(url=url)
    assert "hunter2" not in str(raised.value)


def test_limits_out_of_range_are_refused():
    small = {"max_concurrency": 0, "max_retries": -1, "timeout_s": 0, "backoff_s": -1, "breaker_failures": 0}
    for name, value in (small | {"cache_size": -1, "read_timeout_s": inf, "max_answer_mb": nan}).items():
        with pytest.raises(ValueError, match=name):
            ServerSettings(url="http://host", **{name: value})


def test_a_key_says_everything_that_it_is_made_of():
    picture = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    keys = [
        content_key("a", "bc", picture),
        content_key("ab", "c", picture),
        content_key("a", b"bc", picture),
        content_key("a", "bc", picture.reshape(4, 1, 3)),
        content_key("a", "bc", picture.astype(np.int8)),
        content_key("a", "bc", picture + np.uint8(1)),
    ]
    assert len(set(keys)) == len(keys)
    assert content_key("a", "bc", picture[:, ::-1]) == content_key("a", "bc", picture[:, ::-1].copy())


def test_the_cache_keeps_what_was_used_last_and_counts_hits():
    cache = AnswerCache(2)
    for key in (b"a", b"b"):
        cache.put(key, 0.0)
    assert cache.find(b"a") == 0.0
    cache.put(b"c", 1.0)
    assert cache.find(b"b") is None and cache.find(b"a") == 0.0 and cache.num_hits == 2
    none = AnswerCache(0)
    none.put(b"a", 1.0)
    assert none.find(b"a") is None and none.num_hits == 0


def test_waits_before_retries_are_random_below_a_bound_that_doubles_up_to_a_limit():
    client = client_of("http://host", backoff_s=1.0, max_backoff_s=5.0)
    for num_attempts, most in ((1, 1), (2, 2), (3, 4), (4, 5), (500, 5)):
        waits = [client._backoff_s(num_attempts) for _ in range(200)]
        assert 0 <= min(waits) < most / 4 and most * 0.75 < max(waits) <= most
