# SPDX-License-Identifier: Apache-2.0
"""Steps before the window, run once for the samples of a group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.prefix import Lanes, SharedPrefix
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler
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


def test_a_group_is_one_lane_until_its_window_begins():
    lanes, num_shared = lanes_of(two_groups(), [5, 8, 5, 8, 5])
    assert lanes[0] == lanes[1] == Lanes((0, 1), (0, 1, 0, 1, 0))
    assert lanes[2] == lanes[3] == Lanes((0, 1, 2, 4), (0, 1, 2, 1, 3))
    assert lanes[4] == lanes[5] == Lanes((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)) and lanes[5].is_whole
    assert num_shared == (0, 0, 2, 4, 2)


def test_rows_run_alone_without_shared_noise_or_with_other_prompts():
    apart = [replace(one, sampling=replace(SHARED, shared_initial_noise=False)) for one in two_groups()]
    lanes, num_shared = lanes_of(apart, [5, 8, 5, 8, 5])
    assert all(one.is_whole for one in lanes) and num_shared == (0,) * 5
    rewritten = [request("a", index, LATE, prompt=f"a red circle {index}") for index in range(3)]
    assert all(one.is_whole for one in lanes_of(rewritten, [5, 5, 5])[0])


def test_samples_without_a_window_share_every_step():
    assert lanes_of([request("a", index, ODE_ONLY) for index in range(3)], [5, 5, 5])[1] == (0, 6, 6)


@pytest.fixture(scope="module")
def model(tiny_qwen_image: Path) -> DiffusionModel:
    return load_model(tiny_qwen_image)


@pytest.fixture(scope="module")
def network(model: DiffusionModel) -> nn.Module:
    return model.load_transformer(torch.float32).requires_grad_(False)


@pytest.fixture(scope="module")
def conditions(model: DiffusionModel) -> dict[str, Condition]:
    texts = ["a red circle", " "]
    found = model.load_encoder(torch.float32, CPU)([PromptInputs(text) for text in texts])
    return dict(zip(texts, found, strict=True))  # type: ignore[arg-type]


def sample(
    model: DiffusionModel, network: nn.Module, conditions: dict[str, Condition], requests: list[SampleRequest]
) -> tuple[list[Trajectory], Tensor, list[int]]:
    """Trajectories, final latents, and rows of each forward."""
    sizes: list[int] = []
    handle = network.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    sampler = Sampler(model, network, run_seed=7, device=CPU, latents_dtype=torch.float32)
    negative = [conditions[" "]] * len(requests) if requests[0].sampling.is_guided else None
    given = [conditions[one.inputs.text] for one in requests]
    trajectories, latents = sampler.sample(requests, given, negative, version=0)
    handle.remove()
    return trajectories, latents, sizes


def path_of(trajectory: Trajectory) -> PathRecord:
    assert isinstance(trajectory.record, PathRecord)
    return trajectory.record


@pytest.mark.parametrize("solver", ["euler", "unipc"])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
def test_samples_are_those_generated_one_by_one(model, network, conditions, solver, true_cfg_scale):
    """Up to the window bitwise, because both run it for one row."""
    how = replace(SHARED, solver=solver, true_cfg_scale=true_cfg_scale)
    requests = two_groups(how)
    together, latents, sizes = sample(model, network, conditions, requests)
    branches = 2 if true_cfg_scale > 1 else 1
    assert sizes == [branches * rows for rows in (2, 2, 4, 4, 5, 5)]
    for row, asked in enumerate(requests):
        (alone,), expected, _ = sample(model, network, conditions, [asked])
        torch.testing.assert_close(latents[row], expected[0], atol=1e-5, rtol=0)
        for name, column in alone.record.columns().items():
            torch.testing.assert_close(together[row].record.columns()[name], column, atol=1e-5, rtol=0)
    starts = [path_of(one).latents[0] for one in together]
    assert torch.equal(starts[0], starts[2]) and torch.equal(starts[1], starts[3])
    assert not torch.equal(latents[0], latents[2]) and not torch.equal(latents[1], latents[3])
    assert [one.num_shared_steps for one in together] == [0, 0, 2, 4, 2]


def test_a_group_alone_starts_its_window_with_bitwise_the_latents_of_a_sample_alone(model, network, conditions):
    group = [request("a", index, LATE) for index in range(4)]
    together, _, sizes = sample(model, network, conditions, group)
    assert sizes == [1, 1, 4, 4, 4, 4]
    for row, asked in enumerate(group):
        (alone,), _, _ = sample(model, network, conditions, [asked])
        assert torch.equal(path_of(together[row]).latents[0], path_of(alone).latents[0])
