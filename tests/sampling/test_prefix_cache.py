# SPDX-License-Identifier: Apache-2.0
"""Latents at the start of windows, kept from batch to batch."""

from dataclasses import replace

import pytest
import torch

from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.sampling.prefix import Prefix, PrefixCache, prefix_of
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.types import Geometry, SampleRequest, Sampling

SHARED = Sampling(Geometry(64, 64), 6, 1.0, "flow", 0.7, shared_initial_noise=True)
ASKED = SampleRequest("a", 1, PromptInputs("a cat"), PromptInputs(" "), Window((2, 3), (3,)), SHARED)


def prefix(number: int = 0) -> Prefix:
    found = prefix_of(replace(ASKED, uid=f"g{number}"), 5)
    assert found is not None
    return found


def test_steps_before_the_first_stochastic_one_are_shared():
    assert prefix_of(ASKED, 5) == Prefix("a", 5, ASKED.condition_key, SHARED, num_steps=2)
    assert prefix_of(replace(ASKED, sample_index=7, wants_condition=True), 5) == prefix_of(ASKED, 5)
    ode_only = prefix_of(replace(ASKED, window=ODE_ONLY), 5)
    assert ode_only is not None and ode_only.num_steps == 6
    assert prefix_of(replace(ASKED, window=Window((0, 1), (1,))), 5) is None
    assert prefix_of(replace(ASKED, sampling=replace(SHARED, shared_initial_noise=False)), 5) is None


@pytest.mark.parametrize(
    "other",
    [
        {"uid": "b"},
        {"inputs": PromptInputs("a dog")},
        {"window": Window((3, 4), (3,))},
        {"sampling": replace(SHARED, guidance_scale=2.0)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_whatever_the_latents_depend_on_makes_another_entry(other):
    cache = PrefixCache()
    found, changed = prefix_of(ASKED, 5), prefix_of(replace(ASKED, **other), 5)
    assert found is not None and changed is not None
    cache.keep(found, 0, torch.ones(2))
    assert cache.lookup(changed, 0) is None and cache.lookup(replace(found, seed=6), 0) is None
    assert torch.equal(cache.lookup(found, 0), torch.ones(2))


def test_no_entry_outlives_its_weights():
    cache = PrefixCache()
    cache.keep(prefix(), 3, torch.ones(2))
    assert cache.lookup(prefix(), 4) is None
    cache.clear()
    assert cache.lookup(prefix(), 3) is None and cache.num_bytes == 0
    cache.keep(prefix(0), 3, torch.ones(2))
    cache.keep(prefix(1), 4, torch.ones(2))
    assert cache.lookup(prefix(0), 3) is None and cache.lookup(prefix(0), 4) is None
    assert cache.num_bytes == 8


def test_entries_are_copies_and_those_used_least_recently_go_first():
    cache = PrefixCache(max_bytes=16)
    latents = torch.zeros(2)
    cache.keep(prefix(0), 0, latents)
    latents += 1
    cache.keep(prefix(1), 0, latents)
    assert cache.lookup(prefix(0), 0).tolist() == [0.0, 0.0]
    cache.keep(prefix(2), 0, latents)
    assert cache.lookup(prefix(1), 0) is None
    assert cache.lookup(prefix(0), 0) is not None and cache.lookup(prefix(2), 0) is not None
    cache.keep(prefix(2), 0, latents)
    assert cache.num_bytes == 16
    cache.keep(prefix(3), 0, torch.zeros(5))
    assert cache.num_bytes == 16, "one that is larger than the bound is not kept, and drops no other"
