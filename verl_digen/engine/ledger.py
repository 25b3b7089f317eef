# SPDX-License-Identifier: Apache-2.0
"""Streaming advantages: the samples of a logical batch that can train before all rewards have arrived.

A group is complete when it arrives, so its mean is known. The scale that divides its centred rewards may not be:

| `digen.advantage.scale` | scale known | a sample trains at once |
| --- | --- | --- |
| group, none | with the group | yes, with its advantage |
| batch, max_group | with the last group | with the centred reward; the gradient is divided by the scale afterwards |
| the same, given at the start | at once | with its advantage; mini-batches of one batch share its scale |

The second line is exact while the loss is homogeneous in the advantage and clamping (`digen.loss.advantage_clip`) does
not bind. So these samples are held back until the scale is known, and then train with their advantages:

- samples that might be clamped. The rewards seen so far give a lower bound on the final scale: sqrt(sum of squares
  about their mean / planned samples), or the largest group scale so far. A sample whose centred reward is within the
  clip times that bound cannot be clamped. As the bound rises, held samples are released;
- all samples, if the loss is not homogeneous: training then starts with the last group;
- the others of their group, if the objective needs a group's rows together.

In a tree (`digen.branches`) a sample has an advantage for each of its K points, its node's, and is held while any of
them might be clamped. Scales other than "group" are made of the samples' rewards, so they stay one number.

Invariants (tests/engine/test_ledger.py): every sample is released exactly once; a centred reward that is released
before the scale is known gives, divided by the scale, an advantage that is not clamped; a group is added once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.advantages import advantage_scale, group_advantages
from verl_digen.algorithms.tree import tree_advantages
from verl_digen.config import AdvantageConfig

BATCH_SCALES = ("batch", "max_group")
"""Values of `digen.advantage.scale` that need the rewards of the whole batch."""

ROUNDING = 1e-6
"""Relative margin inside the clip for a sample to count as unclamped: above fp32 rounding, otherwise negligible."""


@dataclass(frozen=True)
class Ready:
    """Samples that train now."""

    keys: tuple[str, ...]
    advantages: Tensor
    """[n] fp32, or [n, K] with a tree: advantages, or centred rewards while `divisor` is unknown."""
    divisor: float | None
    """None while the scale is unknown: divide this gradient later. A number: these advantages are already divided;
    divide the gradient accumulated so far with None by it now."""


class AdvantageLedger:
    """Streaming advantages of one logical batch.

    Args:
        num_samples: most samples the batch may have; it is complete when that many have arrived.
        is_homogeneous: True if the loss is, see `verl_digen.algorithms.objectives`.
        scale: scale of the batch that these samples are part of; None if they are the batch.
        whole_groups: True releases a group's samples together.

    Example, scale "batch", clip 5:
        ledger = AdvantageLedger(AdvantageConfig(), num_samples=4, clip=5.0, is_homogeneous=True)
        ledger.add(["a0", "a1"], ["a", "a"], [1.0, 0.0])
        ledger.take()    # Ready(("a0", "a1"), [0.5, -0.5], divisor=None): to be divided by the scale
        ledger.add(["b0", "b1"], ["b", "b"], [0.0, 0.0])
        ledger.take()    # Ready(("b0", "b1"), [0, 0], divisor=0.4331): advantages; earlier gradients are divided by it
    """

    def __init__(
        self,
        config: AdvantageConfig,
        num_samples: int,
        clip: float,
        is_homogeneous: bool,
        scale: float | None = None,
        whole_groups: bool = False,
    ):
        self.config, self.num_samples, self.clip, self.is_homogeneous = config, num_samples, clip, is_homogeneous
        self.whole_groups = whole_groups
        self.scale = scale if config.scale in BATCH_SCALES else None
        self.keys: list[str] = []
        self.groups: list[str] = []
        self.rewards: list[float] = []
        self.nodes: list[tuple[int, ...]] = []
        """Per sample its K nodes, see `SampleFacts.nodes`; () without a tree."""
        self._early: list[list[float]] = []
        """Per sample the values it can train with once its group is known, one or K: advantages, or centred rewards."""
        self._largest_scale = 0.0
        """Largest scale of the groups so far; only under max_group."""
        self._waiting: list[int] = []

    @property
    def held(self) -> tuple[str, ...]:
        """Keys of samples that are held back or not taken yet."""
        return tuple(self.keys[index] for index in self._waiting)

    @property
    def is_complete(self) -> bool:
        """True if every planned sample has arrived."""
        return len(self.keys) == self.num_samples

    @property
    def is_scale_late(self) -> bool:
        """True if the scale is known only with the whole batch."""
        return self.config.scale in BATCH_SCALES and self.scale is None

    @property
    def waits_for_batch(self) -> bool:
        """True if nothing can train before the batch is complete."""
        return self.is_scale_late and not self.is_homogeneous

    def add(
        self,
        keys: Sequence[str],
        groups: Sequence[str],
        rewards: Sequence[float],
        nodes: Sequence[tuple[int, ...]] | None = None,
    ) -> None:
        """Add complete groups: key, group and reward of each sample, and its nodes in the group's tree. RuntimeError if
        a group or a sample came before, or there are more samples than planned; nothing is added."""
        twice = sorted({*keys} & {*self.keys}) or sorted({*groups} & {*self.groups})
        if twice or len({*keys}) < len(keys):
            raise RuntimeError(
                f"a group trains once, whole, in one fragment, but {', '.join(twice) or 'a sample'} came twice; "
                "hand over every complete group once"
            )
        if len(self.keys) + len(keys) > self.num_samples:
            raise RuntimeError(
                f"a logical batch begun for {self.num_samples} samples got {len(self.keys) + len(keys)}; "
                "begin with the most samples it may have"
            )
        nodes = [()] * len(keys) if nodes is None else nodes
        if len({len(own) for own in (*self.nodes, *nodes)}) > 1:
            raise RuntimeError(
                "samples of a logical batch must have equally many nodes of a tree, or none, got "
                f"{sorted({len(own) for own in (*self.nodes, *nodes)})}; generate all of them under one digen.branches"
            )
        # centred rewards while the scale is unknown
        own_scale = "none" if self.config.scale in BATCH_SCALES else self.config.scale
        early = self._advantages(rewards, groups, nodes, own_scale)
        early = early if self.scale is None else early / self.scale
        self._early += (early if early.dim() == 2 else early[:, None]).tolist()
        if self.config.scale == "max_group":
            self._largest_scale = max(self._largest_scale, self._scale(rewards, groups))
        self._waiting += range(len(self.keys), len(self.keys) + len(keys))
        self.keys += keys
        self.groups += groups
        self.rewards += rewards
        self.nodes += nodes

    def take(self, *, is_last: bool = False) -> Ready:
        """Release the samples that can train now. With `is_last` no more groups will come (e.g. some were dropped), so
        the scale is known."""
        if not self.keys:
            return Ready((), torch.zeros(0), None)
        advantages, chosen, divisor = self._early_advantages(), self._waiting, 1.0
        if self.is_scale_late and (is_last or self.is_complete):
            advantages = self._advantages(self.rewards, self.groups, self.nodes, self.config.scale)
            divisor = self._scale(self.rewards, self.groups)
        elif self.is_scale_late:
            largest = self._largest_unclamped()
            late = [index for index in self._waiting if max(map(abs, self._early[index])) > largest]
            kept = {self.groups[index] for index in late} if self.whole_groups else set()
            chosen = [index for index in self._waiting if index not in {*late} and self.groups[index] not in kept]
            divisor = None
        given = {*chosen}
        self._waiting = [index for index in self._waiting if index not in given]
        return Ready(tuple(self.keys[index] for index in chosen), advantages[chosen], divisor)

    def advantages(self) -> Tensor:
        """Advantages of all samples that came, [samples] fp32, or [samples, K] with a tree, not clamped; the scale is
        theirs or the given one."""
        if self.is_scale_late:
            return self._advantages(self.rewards, self.groups, self.nodes, self.config.scale)
        return self._early_advantages()

    def _early_advantages(self) -> Tensor:
        early = torch.tensor(self._early)
        return early if any(self.nodes) else early.reshape(-1)

    def _advantages(
        self, rewards: Sequence[float], groups: Sequence[str], nodes: Sequence[tuple[int, ...]], scale: str
    ) -> Tensor:
        """Advantages [samples] fp32, or [samples, K] with a tree."""
        config, values = self.config, torch.tensor(rewards, dtype=torch.float64)
        if any(nodes):
            return tree_advantages(values, groups, nodes, scale=scale, ddof=config.ddof, eps=config.eps)
        return group_advantages(values, groups, scale=scale, ddof=config.ddof, eps=config.eps)

    def _scale(self, rewards: Sequence[float], groups: Sequence[str]) -> float:
        """Scale of these rewards as if they were the whole batch."""
        config, values = self.config, torch.tensor(rewards, dtype=torch.float64)
        return advantage_scale(values, groups, scale=config.scale, ddof=config.ddof, eps=config.eps)[0].item()

    def _largest_unclamped(self) -> float:
        """Largest centred reward that cannot be clamped, whatever rewards follow; -1 if the loss is not homogeneous.
        More rewards can only add to the sum of squares about the mean, and at most the planned samples arrive."""
        if not self.is_homogeneous:
            return -1.0
        least_scale = self._largest_scale
        if self.config.scale == "batch":
            rewards = torch.tensor(self.rewards, dtype=torch.float64)
            squares = (rewards - rewards.mean()).square().sum().item()
            least_scale = math.sqrt(squares / max(self.num_samples - self.config.ddof, 1)) + self.config.eps
        return self.clip * least_scale * (1 - ROUNDING)
