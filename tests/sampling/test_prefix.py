# SPDX-License-Identifier: Apache-2.0
"""Steps before the window, run once for the samples of a group."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.prefix import Lanes, SharedPrefix
from verl_digen.sampling.prefix_cache import PrefixCache
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler, SamplingStopped
from verl_digen.types import Condition, Geometry, PathRecord, SampleRequest, Sampling, Trajectory

CPU = torch.device("cpu")
SHARED = Sampling(Geometry(64, 64), 6, 1.0, "flow", 0.7, shared_initial_noise=True)
LATE, LATER = Window((2, 3), (2, 3)), Window((4,), (4,))


def request(uid: str, index: int, window: Window, how: Sampling = SHARED, prompt: str = "a red circle"):
    return SampleRequest(uid, index, PromptInputs(prompt), PromptInputs(" "), window, how)


def two_groups(how: Sampling = SHARED) -> list[SampleRequest]:
    """Three samples of a group with a window from step 2, two of one with a window from step 4, in turns."""
    return [
        request(uid, index, window, how)
        for uid, index, window in (
            ("a", 0, LATE),
            ("b", 1, LATER),
            ("a", 1, LATE),
            ("b", 0, LATER),
            ("a", 2, LATE),
        )
    ]


def lanes_of(requests: list[SampleRequest], seeds: list[int]) -> tuple[list[Lanes], tuple[int, ...]]:
    prefix = SharedPrefix(requests, seeds)
    return [prefix.lanes(step) for step in range(6)], prefix.num_shared


def test_samples_wait_for_their_window_and_run_by_themselves_from_there():
    lanes, num_shared = lanes_of(two_groups(), [5, 8, 5, 8, 5])
    assert lanes[0] == lanes[1] == Lanes((), (None,) * 5)
    assert lanes[2] == lanes[3] == Lanes((0, 2, 4), (0, None, 1, None, 2))
    assert lanes[4] == lanes[5] == Lanes((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)) and lanes[5].is_whole
    assert num_shared == (0, 0, 0, 0, 0), "nobody has got latents"
    prefix = SharedPrefix(two_groups(), [5, 8, 5, 8, 5])
    assert [steps.num_steps for steps in prefix.waiting.values()] == [2, 4, 2, 4, 2]
    assert prefix.waiting[0] == prefix.waiting[2] != prefix.waiting[1]
    prefix.count(2)
    prefix.count(3)
    assert prefix.num_shared == (0, 0, 2, 4, 0)


def test_what_a_step_made_goes_to_the_rows_that_ran():
    lanes = Lanes((0, 2), (0, None, 1, 0))
    placed = lanes.place(torch.tensor([10.0, 12.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    assert placed.tolist() == [10.0, 1.0, 12.0, 10.0]


def test_rows_run_alone_without_shared_noise_or_with_other_prompts():
    apart = [replace(one, sampling=replace(SHARED, shared_initial_noise=False)) for one in two_groups()]
    lanes, num_shared = lanes_of(apart, [5, 8, 5, 8, 5])
    assert all(one.is_whole for one in lanes) and num_shared == (0,) * 5
    rewritten = [request("a", index, LATE, prompt=f"a red circle {index}") for index in range(3)]
    assert len(set(SharedPrefix(rewritten, [5, 5, 5]).waiting.values())) == 3
    ode_only = [request("a", 0, ODE_ONLY, prompt=f"a red circle {index}") for index in range(3)]
    assert all(one.is_whole for one in lanes_of(ode_only, [5, 5, 5])[0])


def test_samples_without_a_window_share_every_step():
    assert lanes_of([request("a", index, ODE_ONLY) for index in range(3)], [5, 5, 5])[1] == (0, 6, 6)


@pytest.fixture(scope="module")
def conditions(model: DiffusionModel) -> dict[str, Condition]:
    texts = ["a red circle", " "]
    found = model.load_encoder(torch.float32, CPU)([PromptInputs(text) for text in texts])
    return dict(zip(texts, found, strict=True))  # type: ignore[arg-type]


def sample(
    model: DiffusionModel,
    network: nn.Module,
    conditions: dict[str, Condition],
    requests: list[SampleRequest],
    prefixes: PrefixCache | None = None,
) -> tuple[list[Trajectory], Tensor, list[int]]:
    """Trajectories, final latents, and rows of each forward."""
    sizes: list[int] = []
    handle = network.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    sampler = Sampler(model, network, run_seed=7, device=CPU, latents_dtype=torch.float32, prefixes=prefixes)
    negative = [conditions[" "]] * len(requests) if requests[0].sampling.is_guided else None
    given = [conditions[one.inputs.text] for one in requests]
    trajectories, latents = sampler.sample(requests, given, negative, version=0)
    handle.remove()
    return trajectories, latents, sizes


def path_of(trajectory: Trajectory) -> PathRecord:
    assert isinstance(trajectory.record, PathRecord)
    return trajectory.record


def assert_bitwise(found: Trajectory, expected: Trajectory) -> None:
    for name, column in expected.record.columns().items():
        assert torch.equal(found.record.columns()[name], column), name


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
def test_pictures_are_bitwise_those_of_a_batch_that_shares_nothing(model, network, conditions, solver, true_cfg_scale):
    requests = two_groups(replace(SHARED, solver=solver, true_cfg_scale=true_cfg_scale))
    apart, expected, sizes_apart = sample(model, network, conditions, requests, PrefixCache(max_bytes=0))
    shared, latents, sizes = sample(model, network, conditions, requests)
    branches = 2 if true_cfg_scale > 1 else 1
    assert sizes == [branches * rows for rows in (*[1] * 2, *[1] * 4, 3, 3, 5, 5)]
    assert sizes_apart == [branches * rows for rows in (*[1] * 3 * 2, *[1] * 2 * 4, 3, 3, 5, 5)]
    assert torch.equal(latents, expected)
    for found, alone in zip(shared, apart, strict=True):
        assert_bitwise(found, alone)
    assert not torch.equal(latents[0], latents[2]) and not torch.equal(latents[1], latents[3])
    assert [one.num_shared_steps for one in shared] == [0, 0, 2, 4, 2]
    assert [one.num_shared_steps for one in apart] == [0] * 5


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_samples_are_those_generated_one_by_one(model, network, conditions, solver):
    """Up to the window bitwise, whatever else is in the batch; after it up to the rounding of another batch size."""
    requests = two_groups(replace(SHARED, solver=solver))
    together, latents, _ = sample(model, network, conditions, requests)
    for row, asked in enumerate(requests):
        (alone,), expected, sizes = sample(model, network, conditions, [asked])
        assert sizes == [1] * 6
        torch.testing.assert_close(latents[row], expected[0], atol=1e-5, rtol=0)
        for name, column in alone.record.columns().items():
            torch.testing.assert_close(together[row].record.columns()[name], column, atol=1e-5, rtol=0)
        assert torch.equal(path_of(together[row]).latents[0], path_of(alone).latents[0])


@pytest.mark.parametrize("solver", ["euler", "dpm2"])
def test_a_later_batch_of_the_group_begins_at_its_window_with_bitwise_the_same_samples(
    model, network, conditions, solver
):
    requests = two_groups(replace(SHARED, solver=solver))
    cache = PrefixCache()
    sample(model, network, conditions, requests[:2], cache)
    for asked in requests[2:]:
        (found,), latents, sizes = sample(model, network, conditions, [asked], cache)
        (alone,), expected, _ = sample(model, network, conditions, [asked])
        assert sizes == [1] * (6 - min(asked.window.sde_steps))
        assert torch.equal(latents, expected)
        assert_bitwise(found, alone)
        assert (found.num_shared_steps, alone.num_shared_steps) == (min(asked.window.sde_steps), 0)


def test_a_batch_that_was_stopped_before_its_window_keeps_nothing(model, network, conditions):
    cache = PrefixCache()
    sampler = Sampler(model, network, run_seed=7, device=CPU, latents_dtype=torch.float32, prefixes=cache)
    answers = iter([False, True])
    with pytest.raises(SamplingStopped, match="before denoise step 1 of 6"):
        sampler.sample(
            two_groups()[:1], [conditions["a red circle"]], None, version=0, should_stop=lambda: next(answers)
        )
    assert cache.num_bytes == 0
