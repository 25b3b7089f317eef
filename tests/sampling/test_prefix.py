# SPDX-License-Identifier: Apache-2.0
"""Steps before the window, run once for the samples of a group, and kept from batch to batch."""

from dataclasses import replace

import pytest
import torch

from tests.sampling.runs import assert_bitwise, run
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.sampling.prefix import Lanes, Prefix, PrefixCache, SharedPrefix, prefix_of
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler, SamplingStopped
from verl_digen.types import Geometry, SampleRequest, Sampling

CPU = torch.device("cpu")
SHARED = Sampling(Geometry(64, 64), 6, 1.0, "flow", 0.7, shared_initial_noise=True)
LATE, LATER = Window((2, 3), (2, 3)), Window((4,), (4,))


def request(uid: str, index: int, window: Window, how: Sampling = SHARED, prompt: str = "a red circle"):
    return SampleRequest(uid, index, PromptInputs(prompt), PromptInputs(" "), window, how)


def two_groups(how: Sampling = SHARED) -> list[SampleRequest]:
    """Three samples of a group with a window from step 2, two of one with a window from step 4, in turns."""
    windows = {"a": LATE, "b": LATER}
    return [request(uid, index, windows[uid], how) for uid, index in zip("ababa", (0, 1, 1, 0, 2), strict=True)]


def lanes_of(requests: list[SampleRequest], seeds: list[int]) -> tuple[list[Lanes], list[int]]:
    prefix = SharedPrefix(requests, seeds)
    return [prefix.lanes(step) for step in range(6)], prefix.num_shared


def test_samples_wait_for_their_window_and_run_by_themselves_from_there():
    lanes, num_shared = lanes_of(two_groups(), [5, 8, 5, 8, 5])
    assert lanes[0] == lanes[1] == Lanes((), (None,) * 5)
    assert lanes[2] == lanes[3] == Lanes((0, 2, 4), (0, None, 1, None, 2))
    assert lanes[4] == lanes[5] == Lanes((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)) and lanes[5].is_whole
    assert num_shared == [0, 0, 0, 0, 0], "nobody has got latents"
    prefix = SharedPrefix(two_groups(), [5, 8, 5, 8, 5])
    assert [steps.num_steps for steps in prefix.waiting.values()] == [2, 4, 2, 4, 2]
    assert prefix.waiting[0] == prefix.waiting[2] != prefix.waiting[1]
    prefix.count(2)
    prefix.count(3)
    assert prefix.num_shared == [0, 0, 2, 4, 0]


def test_what_a_step_made_goes_to_the_rows_that_ran():
    lanes = Lanes((0, 2), (0, None, 1, 0))
    placed = lanes.place(torch.tensor([10.0, 12.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert placed.tolist() == [10.0, 1.0, 12.0, 10.0]


def test_rows_run_alone_without_shared_noise_or_with_other_prompts():
    apart = [replace(one, sampling=replace(SHARED, shared_initial_noise=False)) for one in two_groups()]
    lanes, num_shared = lanes_of(apart, [5, 8, 5, 8, 5])
    assert all(one.is_whole for one in lanes) and num_shared == [0] * 5
    rewritten = [request("a", index, LATE, prompt=f"a red circle {index}") for index in range(3)]
    assert len(set(SharedPrefix(rewritten, [5, 5, 5]).waiting.values())) == 3
    ode_only = [request("a", 0, ODE_ONLY, prompt=f"a red circle {index}") for index in range(3)]
    assert all(one.is_whole for one in lanes_of(ode_only, [5, 5, 5])[0])


def test_samples_without_a_window_share_every_step():
    assert lanes_of([request("a", index, ODE_ONLY) for index in range(3)], [5, 5, 5])[1] == [0, 6, 6]


@pytest.mark.parametrize(("solver", "branches"), [("euler", 1), ("unipc", 2)], ids=["euler", "unipc, guided"])
def test_pictures_are_bitwise_those_of_a_batch_that_shares_nothing(model, network, condition, solver, branches):
    requests = two_groups(replace(SHARED, solver=solver, true_cfg_scale=1.0 if branches == 1 else 4.0))
    (negative,) = model.load_encoder(torch.float32, CPU)([PromptInputs(" ")])
    given = (model, network, requests, condition, None if branches == 1 else [negative] * 5)
    apart, shared = run(*given, prefixes=PrefixCache(max_bytes=0)), run(*given)
    assert shared.sizes == [branches * rows for rows in (*[1] * 2, *[1] * 4, 3, 3, 5, 5)]
    assert apart.sizes == [branches * rows for rows in (*[1] * 3 * 2, *[1] * 2 * 4, 3, 3, 5, 5)]
    assert torch.equal(shared.latents, apart.latents)
    for found, alone in zip(shared.trajectories, apart.trajectories, strict=True):
        assert_bitwise(found, alone)
    latents = shared.latents
    assert not torch.equal(latents[0], latents[2]) and not torch.equal(latents[1], latents[3])
    assert shared.num_shared == [0, 0, 2, 4, 2] and apart.num_shared == [0] * 5


def test_a_batch_that_was_stopped_before_its_window_keeps_nothing(model, network, condition):
    cache = PrefixCache()
    sampler = Sampler(model, network, run_seed=7, device=CPU, latents_dtype=torch.float32, prefixes=cache)
    stop = iter([False, True]).__next__
    with pytest.raises(SamplingStopped, match="before denoise step 1 of 6"):
        sampler.sample(two_groups()[:1], [condition], None, version=0, should_stop=stop)
    assert cache._entries.currsize == 0


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
    assert cache.lookup(prefix(), 3) is None and cache._entries.currsize == 0
    cache.keep(prefix(0), 3, torch.ones(2))
    cache.keep(prefix(1), 4, torch.ones(2))
    assert cache.lookup(prefix(0), 3) is None and cache.lookup(prefix(0), 4) is None
    assert cache._entries.currsize == 8


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
    assert cache._entries.currsize == 16
    cache.keep(prefix(3), 0, torch.zeros(5))
    assert cache._entries.currsize == 16, "one that is larger than the bound is not kept, and drops no other"
