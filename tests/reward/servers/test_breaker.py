# SPDX-License-Identifier: Apache-2.0
import random
from math import inf

import pytest

from verl_digen.reward.servers.balancer import Balancer, Started
from verl_digen.reward.servers.breaker import Breaker


def opened(at_s=0.0):
    breaker = Breaker(2, 10)
    breaker.failed(at_s)
    breaker.failed(at_s)
    return breaker


def test_it_opens_after_failures_in_a_row_and_a_success_between_starts_the_count_again():
    breaker = Breaker(3, 10)
    for fails in (True, True, False, True, True):
        breaker.failed(0) if fails else breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(0)
    assert breaker.state == "open" and breaker.num_openings == 1


def test_an_open_one_admits_a_single_probe_after_the_cool_down():
    breaker = opened(at_s=5)
    assert breaker.admits_at(6) == 15
    with pytest.raises(RuntimeError, match="open breaker admits no request before 15"):
        breaker.start(14.9)
    assert breaker.start(15) and breaker.admits_at(16) == inf


def test_the_probe_closes_it_or_opens_it_for_another_cool_down_which_is_no_new_opening():
    breaker = opened()
    breaker.start(10)
    breaker.failed(12)
    assert breaker.admits_at(13) == 22 and breaker.num_openings == 1
    breaker.start(22)
    breaker.succeeded()
    assert breaker.state == "closed" and not breaker.start(22)
    breaker.failed(23)
    breaker.failed(23)
    assert breaker.num_openings == 2


def test_a_cancelled_probe_leaves_its_place_to_the_next_request():
    breaker = opened()
    breaker.cancelled(breaker.start(10))
    assert breaker.start(10)
    breaker.cancelled(False)
    assert breaker.admits_at(10) == inf


def test_a_failure_that_started_before_does_not_lengthen_the_cool_down_and_a_success_ends_it():
    breaker = opened()
    breaker.failed(9)
    assert breaker.admits_at(9) == 10
    breaker.succeeded()
    assert breaker.admits_at(9) == 9


def balancer(num_urls=2, **changed):
    settings = {"max_concurrency": 2, "failures_to_open": 2, "cool_down_s": 10.0}
    return Balancer([f"http://{number}" for number in range(num_urls)], **(settings | changed))


def start(balancer, now_s=0.0, **chosen):
    started = balancer.start(now_s, **chosen)
    assert isinstance(started, Started)
    return started


def test_the_least_busy_url_is_chosen_then_the_least_used():
    pool = balancer(3)
    first, second, third = (start(pool) for _ in range(3))
    assert [one.endpoint.url for one in (first, second, third)] == ["http://0", "http://1", "http://2"]
    pool.succeeded(second)
    assert start(pool).endpoint.url == "http://1"
    pool.succeeded(third)
    pool.succeeded(first)
    assert start(pool).endpoint.url == "http://0"


def test_a_url_that_failed_a_request_gets_it_again_only_if_no_other_is_free():
    pool = balancer(2, max_concurrency=1)
    assert start(pool, avoid="http://0").endpoint.url == "http://1"
    assert start(pool, avoid="http://0").endpoint.url == "http://0"


def test_a_request_for_one_server_waits_for_it():
    pool = balancer(2, max_concurrency=1)
    start(pool, only="http://1")
    assert pool.start(0, only="http://1") == inf
    with pytest.raises(RuntimeError, match="one of"):
        pool.start(0, only="http://9")


def test_a_pause_and_a_cool_down_tell_how_long_to_wait():
    pool = balancer(1)
    pool.paused(start(pool), until_s=7)
    assert pool.start(3) == 4
    for _ in range(2):
        pool.failed(start(pool, 7), 7)
    assert pool.start(8) == 9


def test_limits_hold_in_random_sequences():
    rng = random.Random(0)
    for _ in range(50):
        pool, in_flight, now_s = balancer(3), [], 0.0
        for _ in range(200):
            now_s += rng.random() * 3
            if rng.random() < 0.5 or not in_flight:
                open_before = {one.url for one in pool.endpoints if one.breaker.admits_at(now_s) > now_s}
                found = pool.start(now_s)
                if isinstance(found, Started):
                    assert found.endpoint.url not in open_before
                    in_flight.append(found)
                else:
                    assert found > 0
            else:
                done = in_flight.pop(rng.randrange(len(in_flight)))
                outcome = rng.choice(("succeeded", "failed", "failed", "paused", "cancelled"))
                more = {"failed": (now_s,), "paused": (now_s + 1,)}.get(outcome, ())
                getattr(pool, outcome)(done, *more)
            assert all(0 <= one.num_in_flight <= 2 for one in pool.endpoints)
            assert sum(one.num_in_flight for one in pool.endpoints) == len(in_flight)
        for done in in_flight:
            pool.succeeded(done)
        assert isinstance(pool.start(now_s + 100), Started), "nothing stays locked"
