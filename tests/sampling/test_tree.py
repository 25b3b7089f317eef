# SPDX-License-Identifier: Apache-2.0
"""Groups that are trees (`digen.branches`): generated whole, in parts, and replayed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.engine.harness import NUM_STEPS, SAMPLING, TEXT_WIDTH, all_picks
from verl_digen.algorithms.tree import Tree
from verl_digen.algorithms.window import Window
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.points import PathPoints
from verl_digen.engine.rows import Samples, make_rows
from verl_digen.inputs import PromptInputs
from verl_digen.models import load_model
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.types import PathRecord, SampleRequest, Trajectory

TREE = Tree(splits=(0, 2), factor=2)
WINDOW = Window((0, 1, 2), (0, 1, 2))
SHARED = replace(SAMPLING, shared_initial_noise=True)
CONDITION = {"embeds": torch.randn(4, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))}


def request(leaf: int, uid: str = "g", tree: Tree = TREE, window: Window = WINDOW) -> SampleRequest:
    return SampleRequest(uid, leaf, PromptInputs("a"), PromptInputs(""), window, SHARED, tree=tree)


@pytest.fixture(scope="module")
def sampler(tiny_qwen_image) -> Sampler:
    model = load_model(tiny_qwen_image)
    network = model.load_transformer(torch.float32).requires_grad_(False)
    return Sampler(model, network, run_seed=7, device="cpu", latents_dtype=torch.float32)


def generate(sampler: Sampler, requests: list[SampleRequest]) -> tuple[list[Trajectory], Tensor, list[int]]:
    """Trajectories, final latents, and rows of each forward."""
    sizes: list[int] = []
    handle = sampler.transformer.register_forward_pre_hook(
        lambda module, args, inputs: sizes.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    found = sampler.sample(requests, [CONDITION] * len(requests), None, version=0)
    handle.remove()
    return *found, sizes


def path_of(trajectory: Trajectory) -> PathRecord:
    assert isinstance(trajectory.record, PathRecord)
    return trajectory.record


def test_leaves_are_equal_up_to_their_split_and_differ_after_it(sampler):
    trajectories, final, sizes = generate(sampler, [request(leaf) for leaf in range(4)])
    assert sizes == [1, 2, 2, 4]
    assert [one.num_shared_steps for one in trajectories] == [0, 3, 1, 3]
    assert [one.nodes for one in trajectories] == [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)]
    paths = [path_of(one) for one in trajectories]
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(paths[one].latents[:3], paths[other].latents[:3])
        assert torch.equal(paths[one].log_probs[:2], paths[other].log_probs[:2])
        assert not torch.equal(paths[one].latents[3], paths[other].latents[3])
    assert torch.equal(paths[0].latents[0], paths[2].latents[0])
    assert not torch.equal(paths[0].latents[1], paths[2].latents[1])
    assert len({tuple(row.flatten().tolist()) for row in final}) == 4


@pytest.mark.parametrize("parts", [((0, 1), (2, 3)), ((0,), (1, 2), (3,)), ((3, 1), (2, 0))])
def test_parts_of_a_tree_are_those_of_the_whole(sampler, parts):
    """Chunks know nothing of each other; another group in the batch changes nothing either."""
    whole, final, _ = generate(sampler, [request(leaf) for leaf in range(4)])
    for part in parts:
        found, latents, _ = generate(sampler, [*(request(leaf) for leaf in part), request(1, uid="other")])
        for position, leaf in enumerate(part):
            torch.testing.assert_close(latents[position], final[leaf], atol=1e-5, rtol=0)
            for name, column in whole[leaf].record.columns().items():
                torch.testing.assert_close(found[position].record.columns()[name], column, atol=1e-5, rtol=0)
        assert not torch.allclose(latents[-1], final[1], atol=1e-2)


def test_a_tree_with_deterministic_steps_around_its_window(sampler):
    late = Window((1, 2), (1, 2))
    trajectories, final, sizes = generate(sampler, [request(leaf, tree=Tree((2,), 2), window=late) for leaf in (0, 1)])
    assert sizes == [1, 1, 1, 2]
    assert torch.equal(path_of(trajectories[0]).latents[:2], path_of(trajectories[1]).latents[:2])
    assert not torch.equal(final[0], final[1])


def test_replayed_log_probs_of_a_tree_are_the_recorded_ones(sampler):
    trajectories, _, _ = generate(sampler, [request(leaf) for leaf in range(4)])
    columns = [one.record.columns() for one in trajectories]
    samples = Samples(
        described=[FragmentSample(str(leaf), "g", leaf, 0.0, NUM_STEPS - 1, SHARED, "g") for leaf in range(4)],
        columns={name: [one[name] for one in columns] for name in PathRecord.COLUMNS},
        conditions=[(CONDITION, None)] * 4,
        advantages=torch.zeros(4),
    )
    rows = make_rows(PathPoints(), samples, all_picks(samples))
    step, _ = score_rows(sampler.model, sampler.transformer, rows)
    torch.testing.assert_close(step.log_prob, rows.point.log_probs, atol=2e-5, rtol=0)  # type: ignore[union-attr]
