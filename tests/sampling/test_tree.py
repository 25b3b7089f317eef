# SPDX-License-Identifier: Apache-2.0
"""Groups that are trees (`digen.branches`): generated whole, in parts, and replayed."""

from dataclasses import replace

import pytest
import torch

from tests.engine.harness import SAMPLING, TEXT_WIDTH
from tests.sampling.runs import close, close_columns, path_of, run
from tests.training_rows import rows_of
from verl_digen.algorithms.tree import Tree
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.sampling.sampler import score_rows
from verl_digen.types import SampleRequest

TREE = Tree(splits=(0, 2), factor=2)
WINDOW = Window((0, 1, 2), (0, 1, 2))
SHARED = replace(SAMPLING, shared_initial_noise=True)
CONDITION = {"embeds": torch.randn(4, TEXT_WIDTH, generator=torch.Generator().manual_seed(1))}


def request(leaf: int, uid: str = "g", tree: Tree = TREE, window: Window = WINDOW) -> SampleRequest:
    return SampleRequest(uid, leaf, PromptInputs("a"), PromptInputs(""), window, SHARED, tree=tree)


@pytest.fixture(scope="module")
def generate(model, network):
    return lambda requests: run(model, network, requests, CONDITION)


def test_leaves_are_equal_up_to_their_split_and_differ_after_it(generate):
    found = generate([request(leaf) for leaf in range(4)])
    trajectories, final = found.trajectories, found.latents
    assert found.sizes == [1, 2, 2, 4]
    assert found.num_shared == [0, 3, 1, 3]
    assert [one.facts.nodes for one in trajectories] == [(0, 0, 0), (0, 0, 1), (2, 2, 2), (2, 2, 3)]
    paths = [path_of(one) for one in trajectories]
    for one, other in ((0, 1), (2, 3)):
        assert torch.equal(paths[one].latents[:3], paths[other].latents[:3])
        assert torch.equal(paths[one].log_probs[:2], paths[other].log_probs[:2])
        assert not torch.equal(paths[one].latents[3], paths[other].latents[3])
    assert torch.equal(paths[0].latents[0], paths[2].latents[0])
    assert not torch.equal(paths[0].latents[1], paths[2].latents[1])
    assert len({tuple(row.flatten().tolist()) for row in final}) == 4


@pytest.mark.parametrize("parts", [((0, 1), (2, 3)), ((0,), (1, 2), (3,)), ((3, 1), (2, 0))])
def test_parts_of_a_tree_are_those_of_the_whole(generate, parts):
    """Chunks know nothing of each other; another group in the batch changes nothing either."""
    whole = generate([request(leaf) for leaf in range(4)])
    for part in parts:
        found = generate([*(request(leaf) for leaf in part), request(1, uid="other")])
        for position, leaf in enumerate(part):
            close(found.latents[position], whole.latents[leaf])
            close_columns(found.trajectories[position], whole.trajectories[leaf])
        assert not torch.allclose(found.latents[-1], whole.latents[1], atol=1e-2)


def test_a_tree_with_deterministic_steps_around_its_window(generate):
    late = Window((1, 2), (1, 2))
    found = generate([request(leaf, tree=Tree((2,), 2), window=late) for leaf in (0, 1)])
    assert found.sizes == [1, 1, 1, 2]
    first, second = map(path_of, found.trajectories)
    assert torch.equal(first.latents[:2], second.latents[:2])
    assert not torch.equal(found.latents[0], found.latents[1])


def test_replayed_log_probs_of_a_tree_are_the_recorded_ones(model, network, generate):
    found = generate([request(leaf) for leaf in range(4)])
    rows = rows_of(found.trajectories, [(leaf, step) for leaf in range(4) for step in range(3)], [CONDITION] * 4, None)
    step, _ = score_rows(model, network, rows)
    close(step.log_prob, rows.point.log_probs, 2e-5)
