# SPDX-License-Identifier: Apache-2.0
"""Parity of `vllm_omni` and `diffusers` replicas: equal samples for equal requests."""

import random
from dataclasses import replace

import pytest
import ray
import torch

from tests.vllm_omni.compare import assert_same, by_diffusers
from tests.vllm_omni.conftest import GUIDED, SAMPLING, request
from verl_digen.algorithms.forward import NoiseLevels
from verl_digen.algorithms.solvers import SolverNoise
from verl_digen.algorithms.tree import Tree
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.types import CleanRecord, PathRecord


@pytest.mark.parametrize("sampling", [SAMPLING, replace(GUIDED, solver="unipc")], ids=["plain", "guided, unipc"])
@pytest.mark.parametrize("num_concurrent", [1, 8])
def test_latents_log_probs_and_pictures_are_those_of_the_diffusers_replica(full_replica, sampling, num_concurrent):
    requests = [request(number, sampling) for number in range(8)]
    expected = by_diffusers(full_replica.path, requests)
    order = list(range(8))
    random.Random(0).shuffle(order)
    for start in range(0, 8, num_concurrent):
        part = order[start : start + num_concurrent]
        for number, got in zip(part, full_replica.generate([requests[index] for index in part]), strict=True):
            assert_same(got, expected[number])


def test_final_latents_for_forward_points_are_those_of_the_diffusers_replica(full_replica):
    """One batch with a sample whose path is recorded."""
    noisy = replace(SAMPLING, solver="sa", solver_noise=SolverNoise(0.4, 0.0, 0.9))
    levels = NoiseLevels((0, 2, 5))
    forward = [replace(request(number, noisy), window=ODE_ONLY, noise_levels=levels) for number in range(3)]
    requests = [*forward, request(3, noisy)]
    expected = by_diffusers(full_replica.path, requests)
    for got, wanted in zip(full_replica.generate(requests), expected, strict=True):
        assert_same(got, wanted)
    assert [type(wanted.trajectory.record) for wanted in expected] == [CleanRecord] * 3 + [PathRecord]


def test_samples_of_a_tree_are_those_of_the_diffusers_replica(full_replica):
    """Each leaf by itself, without saved steps: equal up to the rounding of batches of other sizes."""
    shared = replace(SAMPLING, shared_initial_noise=True)
    requests = [replace(request(number, shared), tree=Tree((0, 3), 2)) for number in range(3)]
    found, expected = full_replica.generate(requests), by_diffusers(full_replica.path, requests)
    for got, wanted in zip(found, expected, strict=True):
        assert_same(got, wanted)
        assert got.trajectory.facts.nodes == wanted.trajectory.facts.nodes
    latents = [got.trajectory.record.latents for got in found]
    torch.testing.assert_close(latents[0][:4], latents[1][:4], atol=1e-5, rtol=0)
    assert not torch.allclose(latents[0][4], latents[1][4], atol=1e-2)
    assert not torch.allclose(latents[0][1], latents[2][1], atol=1e-2)


def test_a_prompt_is_encoded_once_while_the_cache_has_room(full_replica):
    before = full_replica.health()["prompt_cache"]
    asked = [request(number) for number in (0, 1, 2, 0, 1)]
    full_replica.generate(asked[:1])
    full_replica.generate(asked[1:])
    after = full_replica.health()["prompt_cache"]
    assert after["hits"] - before["hits"] >= 4 and after["misses"] - before["misses"] <= 1
    assert after["max_size"] == 8


def test_a_request_that_cannot_run_is_an_error_that_says_why_and_the_next_one_works(full_replica):
    broken = replace(request(0), sampling=replace(SAMPLING, law="nonsense"))
    with pytest.raises(Exception, match="nonsense"):
        full_replica.generate([broken])
    assert len(full_replica.generate([request(1)])) == 1


def test_a_closed_gate_lets_requests_under_way_finish(full_replica):
    slow = replace(SAMPLING, num_steps=100)
    running = [full_replica.submit(request(number, slow)) for number in range(4)]
    while full_replica.health()["num_running"] < 4:
        assert not ray.wait(running, timeout=0)[0], "one finished before all had begun"
    ray.get(full_replica.server.abort_all_requests.remote())
    late = full_replica.submit(request(5))
    ray.get(full_replica.server.wait_for_requests_to_drain.remote())
    assert len(ray.get(running)) == 4
    assert not ray.wait([late], timeout=0.5)[0]
    ray.get(full_replica.server.open_submission_gate.remote())
    assert ray.get(late).trajectory.facts.uid == "p1"


def test_one_request_is_aborted_and_the_others_are_not(full_replica):
    slow = replace(SAMPLING, num_steps=100)
    running = [full_replica.submit(request(number, slow)) for number in range(3)]
    while full_replica.health()["num_running"] < 3:
        assert not ray.wait(running, timeout=0)[0], "one finished before all had begun"
    wanted = request(1, slow)
    ray.get(full_replica.server.abort_request.remote(f"{wanted.uid}_{wanted.sample_index}"))
    with pytest.raises(Exception, match="was aborted"):
        ray.get(running[1], timeout=60)
    assert len(ray.get([running[0], running[2]])) == 2


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_prompts_encoded_for_the_trainer_are_those_that_a_sample_carries(full_replica, sampling):
    asked = replace(request(0, sampling), wants_condition=True)
    (generation,) = full_replica.generate([asked])
    condition, negative_condition = ray.get(full_replica.server.encode.remote(asked))
    torch.testing.assert_close(condition, generation.condition, atol=0, rtol=0)
    assert (negative_condition is None) == (generation.negative_condition is None)
    if negative_condition is not None:
        torch.testing.assert_close(negative_condition, generation.negative_condition, atol=0, rtol=0)
