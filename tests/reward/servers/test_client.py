# SPDX-License-Identifier: Apache-2.0
import asyncio
import itertools
import logging

import pytest
from aiohttp import web

from tests.reward.servers.local import LocalServer, refusing_url
from verl_digen.reward.base import RewardUnavailable
from verl_digen.reward.servers.answers import Failed, HttpRequest, Refused, Unreachable, UnusableAnswer
from verl_digen.reward.servers.client import ServerClient, ServerSettings

FAST = {"backoff_s": 0.001, "max_retries": 3}
GET = HttpRequest("/ping", None)


def client_of(*urls, **changed):
    return ServerClient(ServerSettings(url=list(urls), **(FAST | changed)), "reward server")


def ask(client, *, times=1, read=bytes):
    """Post the number of each call at the same time -> results or errors, in order."""

    async def run():
        calls = [
            client.send(HttpRequest("/score", str(number).encode(), "text/plain"), read) for number in range(times)
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

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
        answer = ask(client_of(server.url + "/"))
    ((method, path, headers, body),) = server.requests
    assert (method, path, body) == ("POST", "/score", b"0")
    assert headers["Content-Type"] == "text/plain" and "Authorization" not in headers
    assert answer == b"\x000"


def test_a_proxy_of_the_environment_is_not_asked(monkeypatch):
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("HTTP_PROXY", refusing_url())
    monkeypatch.setenv("http_proxy", refusing_url())
    with LocalServer(statuses(200)) as server:
        assert ask(client_of(server.url)) == b"status 200"


@pytest.mark.parametrize("end", ["?a=1", "#a"])
def test_a_url_ends_before_its_query(end):
    with pytest.raises(ValueError, match=r"url must end before \? and #, got 'http://host:1[?#]a"):
        ServerSettings(url=f"http://host:1{end}")


@pytest.mark.parametrize("status", [500, 429])
def test_failures_of_the_server_are_retried_and_counted(status):
    with LocalServer(statuses(status, status, 200)) as server:
        client = client_of(server.url)
        assert ask(client) == b"status 200"
    assert len(server.requests) == 3
    assert client.take_counts() == {"retries": 2} and client.take_counts() == {"retries": 0}


@pytest.mark.parametrize("status, for_all", [(302, True), (400, False), (422, False), (401, True), (404, True)])
def test_a_refusal_is_not_retried_and_says_what_came(status, for_all):
    with LocalServer(statuses(status, 200, Location="http://127.0.0.1:1/")) as server:
        error = ask(client_of(server.url))
    assert isinstance(error, Refused) and isinstance(error, RewardUnavailable) == for_all
    assert f"{server.url}/score: status {status}" in str(error) and f"'status {status}'" in str(error)
    assert len(server.requests) == 1


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


def test_an_answer_that_cannot_be_read_is_retried_and_its_beginning_shown():
    async def handler(request):
        good = len(server.requests) == 2
        return web.Response(text="0.5" if good else "<html>no such thing", content_type="text/html")

    def number(answer):
        try:
            return float(answer)
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


def test_an_answer_that_is_too_large_is_refused_before_it_fills_the_memory():
    async def handler(request):
        response = web.StreamResponse()
        response.enable_compression()
        await response.prepare(request)
        for _ in range(100):
            await response.write(bytes(1_000_000))
        return response

    with LocalServer(handler) as server:
        error = ask(client_of(server.url, max_retries=0))
    assert "the answer is larger than 64 MB" in str(error)


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


async def test_retry_after_is_waited_for():
    with LocalServer(statuses(429, **{"Retry-After": "3600"})) as server:
        asked = asyncio.create_task(client_of(server.url).send(GET))
        while not server.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)  # long for retries after at most 2 ms
        asked.cancel()
    assert len(server.requests) == 1


def test_a_retry_goes_to_the_next_server_and_calls_begin_with_each_in_turn():
    with LocalServer(statuses(500)) as bad, LocalServer(statuses(200)) as good:
        client = client_of(bad.url, good.url, max_retries=1)
        assert ask(client, times=6) == [b"status 200"] * 6
    assert (len(bad.requests), len(good.requests)) == (3, 6)


def test_requests_in_flight_never_exceed_the_limit_of_a_url():
    async def handler(request):
        while min(one.max_in_flight, other.max_in_flight) < 3:
            await asyncio.sleep(0.001)
        return web.Response(text="ok")

    with LocalServer(handler) as one, LocalServer(handler) as other:
        assert ask(client_of(one.url, other.url, max_concurrency=3), times=60) == [b"ok"] * 60
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
            assert asyncio.run(client.send(GET)) == b"status 200"


async def test_a_cancelled_call_frees_its_place():
    async def handler(request):
        if len(server.requests) == 1:
            await asyncio.Event().wait()
        return web.Response(text="ok")

    with LocalServer(handler) as server:
        client = client_of(server.url, max_concurrency=1)
        call = asyncio.create_task(client.send(GET))
        while not server.requests:
            await asyncio.sleep(0.001)
        call.cancel()
        assert await client.send(GET) == b"ok"


def test_a_token_goes_into_the_header_and_into_no_message(monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_TOKEN", " s3cret-token ")

    async def handler(request):
        return web.Response(status=500, text=f"bad header {request.headers['Authorization']} " + "x" * 300)

    def echoing(answer):
        raise UnusableAnswer("s3cret-token")

    with LocalServer(handler) as server, caplog.at_level(logging.DEBUG):
        client = client_of(server.url, token_env="JUDGE_TOKEN")
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


@pytest.mark.virtual_time
async def test_waits_before_retries_double_up_to_a_bound_and_are_at_least_what_the_server_asks_for(monkeypatch):
    loop = asyncio.get_running_loop()
    asked_s, wishes = [], iter([0.0] * 6 + [30.0, 0.0])

    async def exchange(*_):
        asked_s.append(loop.time())
        raise Failed("busy", next(wishes))

    client = client_of("http://host", backoff_s=0.5, max_retries=7, timeout_s=1000.0)
    monkeypatch.setattr(client, "_exchange", exchange)
    monkeypatch.setattr("random.uniform", lambda low, high: high)
    with pytest.raises(Failed, match="8 of 8 attempts"):
        await client.send(GET)
    waits = [after - before for before, after in itertools.pairwise(asked_s)]
    assert waits == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 30.0])
