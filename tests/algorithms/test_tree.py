# SPDX-License-Identifier: Apache-2.0
"""Shape of a tree, and advantages of its nodes."""

import math
import random
from statistics import fmean, stdev

import pytest
import torch

from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.tree import BranchesConfig, Tree, tree_advantages
from verl_digen.algorithms.window import Window, WindowConfig

STEPS = range(12)


@pytest.mark.parametrize("tree", [Tree((0, 3, 6, 9), 2), Tree((2, 5), 3), Tree((4,), 5)])
def test_leaves_share_nodes_up_to_their_split_and_never_again(tree: Tree):
    num_leaves = tree.factor ** len(tree.splits)
    for one in range(num_leaves):
        for other in range(one):
            shared = [tree.node(one, step) == tree.node(other, step) for step in STEPS]
            split = shared.index(False)
            assert split in tree.splits and not any(shared[split:])
    for step in STEPS:
        nodes = [tree.node(leaf, step) for leaf in range(num_leaves)]
        assert nodes == sorted(nodes)  # depth first: a range of samples is made of whole subtrees
        assert {nodes.count(node) for node in nodes} == {num_leaves // tree.num_edges([step])}
        assert all(tree.node(node, step) == node for node in nodes)


def test_edges_of_the_published_tree_are_counted():
    """20 steps of which 19 train, 16 leaves: 2, 4, 8 for 3 steps each, then 16 for 10; without a tree 304 rows."""
    tree = Tree((0, 3, 6, 9), 2)
    assert tree.num_edges(range(19)) == 3 * (2 + 4 + 8) + 10 * 16 == 202


def test_advantages_of_a_tree_by_hand():
    nodes = [(0, 0), (0, 1), (2, 2), (2, 3)]
    rewards = torch.tensor([1.0, 3.0, 5.0, 11.0])
    found = tree_advantages(rewards, ["g"] * 4, nodes, scale="none")
    assert found.tolist() == [[-3.0, -4.0], [-3.0, -2.0], [3.0, 0.0], [3.0, 6.0]]
    found = tree_advantages(rewards, ["g"] * 4, nodes, scale="group", ddof=1, eps=0.0)
    assert found[:, 0].tolist() == pytest.approx([-3 / stdev([2, 8])] * 2 + [3 / stdev([2, 8])] * 2)
    assert found[:, 1].tolist() == pytest.approx([value / stdev([1, 3, 5, 11]) for value in (-4, -2, 0, 6)])
    found = tree_advantages(rewards, ["g"] * 4, nodes, scale="batch", eps=0.0)
    assert found[:, 0].tolist() == pytest.approx([value / math.sqrt(14) for value in (-3, -3, 3, 3)])


def test_a_missing_leaf_leaves_nodes_equal_weights():
    """Mean over the nodes of a depth, not over leaves: (2 + 5) / 2."""
    found = tree_advantages(torch.tensor([1.0, 3.0, 5.0]), ["g"] * 3, [(0,), (0,), (2,)], scale="none")
    assert found[:, 0].tolist() == [-1.5, -1.5, 1.5]


@pytest.mark.parametrize("scale", ["batch", "group", "max_group", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_lone_leaves_have_the_advantages_of_samples_without_a_tree(scale: str, ddof: int):
    rng = random.Random(ddof)
    groups = [uid for uid in "abc" for _ in range(4)]
    rewards = torch.tensor([rng.gauss(0, 1) for _ in groups], dtype=torch.float64)
    rewards[:4] = 0.7  # group a: no spread
    nodes = [(index % 4, index % 4) for index in range(len(groups))]
    found = tree_advantages(rewards, groups, nodes, scale=scale, ddof=ddof)
    expected = group_advantages(rewards, groups, scale=scale, ddof=ddof)
    assert found[:4].tolist() == [[0.0, 0.0]] * 4
    torch.testing.assert_close(found, expected[:, None].expand(-1, 2))


def test_the_only_node_of_a_depth_has_no_advantage():
    found = tree_advantages(torch.tensor([0.0, 1.0]), ["g"] * 2, [(0, 0), (0, 1)], scale="group", eps=1e-8)
    assert found[:, 0].tolist() == [0.0, 0.0] and found[1, 1] > 0.99


def test_splits_are_counted_from_the_first_stochastic_step():
    config = BranchesConfig(splits=(0, 2), factor=2)
    assert config.tree(Window((3, 4, 5), (4,))) == Tree((3, 5), 2)
    assert BranchesConfig().tree(Window((0,), (0,))) is None


@pytest.mark.parametrize(
    ("splits", "window", "shares_noise", "message"),
    [
        ((0, 9), WindowConfig(), True, r"must lie within the 9 stochastic steps of digen.window.kind=all"),
        ((0, 2), WindowConfig("consecutive", size=2), True, r"must lie within the 2 stochastic steps"),
        ((0, 2), WindowConfig(), False, r"digen.sampling.shared_initial_noise must be true with digen.branches"),
        ((0, 8), WindowConfig(), True, None),
        ((), WindowConfig(), False, None),
    ],
)
def test_splits_that_no_window_has_are_refused(splits, window, shares_noise, message):
    config = BranchesConfig(splits=splits)
    if message is None:
        return config.validate_for(window, 10, shares_noise=shares_noise)
    with pytest.raises(ValueError, match=message):
        config.validate_for(window, 10, shares_noise=shares_noise)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"splits": (3, 0)}, r"digen.branches.splits must be steps >= 0 in ascending order, got \[3, 0\]"),
        ({"splits": (2, 2)}, r"digen.branches.splits must be steps >= 0 in ascending order"),
        ({"splits": (-1,)}, r"digen.branches.splits must be steps >= 0"),
        ({"factor": 1}, r"digen.branches.factor must be >= 2, got 1; 2 is the default"),
    ],
)
def test_a_malformed_tree_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        BranchesConfig(**arguments)


def test_mean_over_nodes_is_zero_at_every_depth():
    rng, tree = random.Random(3), Tree((0, 1, 3), 2)
    rewards = torch.tensor([rng.random() for _ in range(8)], dtype=torch.float64)
    nodes = [tuple(tree.node(leaf, step) for step in range(5)) for leaf in range(8)]
    for scale in ("batch", "group", "none"):
        found = tree_advantages(rewards, ["g"] * 8, nodes, scale=scale)
        assert all(abs(fmean(found[:, depth].tolist())) < 1e-6 for depth in range(5))
