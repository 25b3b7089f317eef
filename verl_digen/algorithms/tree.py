# SPDX-License-Identifier: Apache-2.0
"""Trees: the samples of a group as leaves that share steps until they split (BranchGRPO, arXiv 2509.06040).

    x_T --0--> node 0 --1--> node 0 --2--> ...        splits (0, 2), factor 2: leaves 0, 1, 2, 3
                             (0, 1)        \\--> node 1
        \\----> node 2 --1--> node 2 --2--> node 2
                             (2, 3)        \\--> node 3

Leaves are numbered depth first, so that a range of samples holds whole subtrees. A node is named by its first leaf. A
step draws its noise as the first leaf of the node that it leads to, so leaves have equal nodes up to their split. A
tree is a function of (run seed, uid) and the config: parts of it that are generated apart fit together. An edge, one
step of one node, trains once, with the advantage of the node that it leads to.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import torch
from torch import Tensor

from verl_digen.algorithms.advantages import advantage_scale, group_advantages, grouped
from verl_digen.algorithms.window import Window, WindowConfig
from verl_digen.require import In, Section, require, require_value


@dataclass(frozen=True)
class Tree:
    """Shape of a group's tree.

    Example:
        tree = Tree(splits=(0, 2), factor=2)
        [tree.node(3, step) for step in range(4)]   # [2, 2, 3, 3]
        tree.num_edges((0, 1, 2, 3))                # 2 + 2 + 4 + 4
    """

    splits: tuple[int, ...]
    """Denoise steps at which every node gets `factor` children, ascending."""
    factor: int

    def node(self, leaf: int, step: int) -> int:
        """First leaf of the node that `step` leads to, on the way to `leaf`."""
        return leaf - leaf % self.factor ** sum(split > step for split in self.splits)

    def num_edges(self, steps: Sequence[int]) -> int:
        """Number of edges of a whole tree at these steps."""
        return sum(self.factor ** sum(split <= step for split in self.splits) for step in steps)


@dataclass(frozen=True)
class BranchesConfig(Section, key="digen.branches"):
    """`digen.branches`: the samples of a group as the leaves of a tree."""

    splits: tuple[int, ...] = ()
    """Steps at which every path splits, counted from the window's first stochastic step, ascending. []: no trees.
    [0,3,6,9] in BranchGRPO."""
    factor: Annotated[int, In("[2, inf]")] = 2
    """Children of a split. factor ^ number of splits is actor_rollout_ref.rollout.n. 2 in BranchGRPO."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "splits", tuple(self.splits))
        super().__post_init__()
        require(
            all(before < after for before, after in pairwise((-1, *self.splits))),
            "digen.branches.splits must be steps >= 0 in ascending order",
            list(self.splits),
            "[0,3,6,9] is BranchGRPO's",
        )

    def validate_for(self, window: WindowConfig, num_steps: int, *, shares_noise: bool) -> None:
        """ValueError unless each split is a stochastic step of all windows, and samples start alike."""
        if not self.splits:
            return
        key, why = "digen.sampling.shared_initial_noise", "with digen.branches.splits, because a tree has one root"
        require_value(key, shares_noise, True, why, f"set {key}=true")
        num_stochastic = window.num_stochastic(num_steps)
        require(
            self.splits[-1] < num_stochastic,
            f"digen.branches.splits must lie within the {num_stochastic} stochastic steps of digen.window.kind="
            f"{window.kind}, so at {num_stochastic - 1} or before",
            list(self.splits),
            "split earlier, widen digen.window.size, or sample more steps",
        )

    def tree(self, window: Window) -> Tree | None:
        """The tree of a group with this window; None if there are no trees."""
        if not self.splits:
            return None
        return Tree(tuple(window.sde_steps[0] + split for split in self.splits), self.factor)


def tree_advantages(
    rewards: Tensor,
    groups: Sequence[Hashable],
    nodes: Sequence[Sequence[int]],
    *,
    scale: str = "group",
    ddof: int = 0,
    eps: float = 1e-4,
) -> Tensor:
    """Advantages of each sample's K nodes, [B, K] fp32 on the device of the rewards [B].

    `nodes` has K numbers of each sample, unique in its group and depth. The value of a node is the mean reward of its
    leaves; its advantage is (value - mean of the values of its group and depth) / scale. `scale` "group" is the std of
    these values + eps, as in BranchGRPO. The other scales are one number for the batch, made of the samples' rewards:
    see `advantage_scale`, also for errors. Inner nodes, whose values lie closer together, then have smaller advantages
    than leaves. With equal rewards every advantage is exactly 0.
    """
    values, members_of = grouped(rewards, groups)
    divisor = advantage_scale(rewards, groups, scale=scale, ddof=ddof, eps=eps)
    advantages = torch.zeros(len(values), len(nodes[0]), dtype=torch.float64)
    for members in members_of.values():
        own = values[members]
        if own.min() == own.max():
            continue
        for depth in range(advantages.shape[1]):
            at_depth = [nodes[index][depth] for index in members]
            found: dict[int, list[int]] = {}
            for position, node in enumerate(at_depth):
                found.setdefault(node, []).append(position)
            level = torch.stack([own[positions].mean() for positions in found.values()])
            if scale == "group":
                centred = group_advantages(level, [0] * len(level), scale="group", ddof=ddof, eps=eps).double()
            else:
                centred = (level - level.mean()) / divisor[members[0]]
            of_node = dict(zip(found, centred, strict=True))
            advantages[members, depth] = torch.stack([of_node[node] for node in at_depth])
    return advantages.to(rewards.device, torch.float32)
