# SPDX-License-Identifier: Apache-2.0
from verl_digen.rollout.bursts import Bursts
from verl_digen.types import Burst

A, B = Burst("a", 3), Burst("b", 1)


def arrived(*bursts: Burst | None) -> Bursts:
    seen = Bursts()
    for burst in bursts:
        seen.arrive(burst)
    return seen


def test_a_burst_is_complete_when_its_last_request_arrives() -> None:
    assert not arrived(A, A).are_complete([A, A])
    assert arrived(A, A, A).are_complete([A, A, A])
    assert arrived(A, A, A).are_complete([A]), "the other two started or were cancelled"
    assert arrived(B).are_complete([B])


def test_an_incomplete_burst_or_a_request_without_one_may_be_followed_by_others() -> None:
    assert not arrived(B, A).are_complete([B, A])
    assert not arrived(B, None).are_complete([B, None])
    assert arrived(B, A, A, A).are_complete([B, A, A, A])


def test_bursts_that_no_request_waits_for_are_forgotten() -> None:
    seen = arrived(A, Burst("c", 2))
    seen.forget_all_but([A, None])
    seen.arrive(A)
    seen.arrive(A)
    assert seen.are_complete([A]) and seen._missing == {}
