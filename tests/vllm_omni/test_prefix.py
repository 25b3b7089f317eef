# SPDX-License-Identifier: Apache-2.0
"""Steps before the window, run once for the samples of a group by a replica that generates step by step.

`test_request_mode.py` has the pipelines that denoise a batch in one call.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.sampling.runs import assert_bitwise as assert_same_record
from tests.vllm_omni.compare import TOLERANCE, assert_same, by_diffusers
from tests.vllm_omni.conftest import GUIDED, SAMPLING, Replica, by_sampler, full_weights, request
from verl_digen.algorithms.window import Window
from verl_digen.models import load_model
from verl_digen.types import Generation, SampleRequest, Sampling

STARTS = {"p0": 3, "p1": 2}
"""Group -> first step of its window."""


def late(numbers: Sequence[int], sampling: Sampling = SAMPLING) -> list[SampleRequest]:
    """Samples of two groups, with windows that begin later and one initial noise per group."""
    asked = [request(number, replace(sampling, shared_initial_noise=True)) for number in numbers]
    windows = {uid: Window((start, start + 1), (start, start + 1)) for uid, start in STARTS.items()}
    return [replace(one, window=windows[one.uid]) for one in asked]


def assert_bitwise(found: Generation, expected: Generation) -> None:
    assert torch.equal(found.pixels, expected.pixels)
    assert_same_record(found.trajectory, expected.trajectory)


def shared_steps(generations: Sequence[Generation]) -> list[int]:
    return [one.trajectory.facts.num_shared_steps for one in generations]


def set_weights(replica: Replica, number: int, version: int) -> None:
    replica.update(full_weights(replica.path, number).items(), version).result()


@pytest.mark.parametrize("sampling", [SAMPLING, replace(GUIDED, solver="dpm2")], ids=["plain", "guided, dpm2"])
def test_a_later_sample_of_a_group_is_bitwise_the_one_that_runs_every_step(full_replica, sampling):
    asked = late(range(5), sampling)
    set_weights(full_replica, 0, 300)
    found = [full_replica.generate([one])[0] for one in asked]
    assert shared_steps(found) == [0, 3, 3, 0, 2]
    for one, got in zip(asked, found, strict=True):
        set_weights(full_replica, 0, 300)  # which forgets what was kept
        (alone,) = full_replica.generate([one])
        assert alone.trajectory.facts.num_shared_steps == 0
        assert_bitwise(got, alone)
    for got, expected in zip(found, by_diffusers(full_replica.path, asked), strict=True):
        assert_same(got, expected)


def test_samples_of_one_batch_begin_their_window_with_bitwise_the_latents_of_one_alone(full_replica):
    asked = late(range(5))
    set_weights(full_replica, 0, 310)
    together = full_replica.generate(asked)
    assert sum(shared_steps(together)) == 2 * 3 + 1 * 2
    for one, got in zip(asked, together, strict=True):
        set_weights(full_replica, 0, 310)
        ours, alone = got.trajectory.record, full_replica.generate([one])[0].trajectory.record
        assert torch.equal(ours.latents[0], alone.latents[0])
        torch.testing.assert_close(ours.latents, alone.latents, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(ours.log_probs, alone.log_probs, atol=TOLERANCE, rtol=0)


def test_no_sample_begins_at_latents_of_the_weights_before_an_update_of_the_same_version(full_replica):
    asked = late(range(3))
    network = load_model(full_replica.path).load_transformer(torch.float32)
    for number in (1, 2):
        set_weights(full_replica, number, 320)
        network.load_state_dict(full_weights(full_replica.path, number))
        found = full_replica.generate(asked)
        assert sorted(shared_steps(found)) == [0, 3, 3]
        for one, got in zip(asked, found, strict=True):
            expected = by_sampler(full_replica.path, network, one, 320)
            torch.testing.assert_close(got.trajectory.record.latents, expected.record.latents, atol=TOLERANCE, rtol=0)
    set_weights(full_replica, 0, 0)
