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
from verl_digen.engine.fragment import FragmentSample

BATCH_SCALES = ("batch", "max_group")
"""Values of `digen.advantage.scale` that need the rewards of the whole batch."""

ROUNDING = 1e-6
"""Relative margin inside the clip for a sample to count as unclamped: above fp32 rounding, otherwise negligible."""


@dataclass(frozen=True)
class Ready:
    """Samples that train now."""

    samples: tuple[FragmentSample, ...]
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
        ledger.add([a0, a1])   # of one group, with rewards 1 and 0
        ledger.take()          # Ready((a0, a1), [0.5, -0.5], divisor=None): to be divided by the scale
        ledger.add([b0, b1])   # with rewards 0 and 0
        ledger.take()          # Ready((b0, b1), [0, 0], divisor=0.4331): advantages; divide earlier gradients by it
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
        self.samples: list[FragmentSample] = []
        self._early: list[list[float]] = []
        """Per sample the values it can train with once its group is known, one or K: advantages, or centred rewards."""
        self._largest_scale = 0.0
        """Largest scale of the groups so far; only under max_group."""
        self._waiting: list[int] = []

    @property
    def held(self) -> tuple[str, ...]:
        """Keys of samples that are held back or not taken yet."""
        return tuple(self.samples[index].key for index in self._waiting)

    @property
    def is_complete(self) -> bool:
        """True if every planned sample has arrived."""
        return len(self.samples) == self.num_samples

    @property
    def is_scale_late(self) -> bool:
        """True if the scale is known only with the whole batch."""
        return self.config.scale in BATCH_SCALES and self.scale is None

    @property
    def waits_for_batch(self) -> bool:
        """True if nothing can train before the batch is complete."""
        return self.is_scale_late and not self.is_homogeneous

    def add(self, samples: Sequence[FragmentSample]) -> None:
        """Add complete groups. RuntimeError if a group or a sample came before, or there are more samples than planned;
        nothing is added."""
        keys, before = {sample.key for sample in samples}, {sample.key for sample in self.samples}
        twice = sorted(keys & before) or sorted({*_groups(samples)} & {*_groups(self.samples)})
        if twice or len(keys) < len(samples):
            raise RuntimeError(
                f"a group trains once, whole, in one fragment, but {', '.join(twice) or 'a sample'} came twice; "
                "hand over every complete group once"
            )
        num_before, num_now = len(self.samples), len(self.samples) + len(samples)
        if num_now > self.num_samples:
            raise RuntimeError(
                f"a logical batch begun for {self.num_samples} samples got {num_now}; "
                "begin with the most samples it may have"
            )
        num_nodes = {len(sample.facts.nodes) for sample in (*self.samples, *samples)}
        if len(num_nodes) > 1:
            raise RuntimeError(
                "samples of a logical batch must have equally many nodes of a tree, or none, got "
                f"{sorted(num_nodes)}; generate all of them under one digen.branches"
            )
        # centred rewards while the scale is unknown
        own_scale = "none" if self.config.scale in BATCH_SCALES else self.config.scale
        early = self._advantages(samples, own_scale)
        early = early if self.scale is None else early / self.scale
        self._early += (early if early.dim() == 2 else early[:, None]).tolist()
        if self.config.scale == "max_group":
            self._largest_scale = max(self._largest_scale, batch_scale(samples, self.config) or 0.0)
        self._waiting += range(num_before, num_now)
        self.samples += samples

    def take(self, *, is_last: bool = False) -> Ready:
        """Release the samples that can train now. With `is_last` no more groups will come (e.g. some were dropped), so
        the scale is known."""
        if not self.samples:
            return Ready((), torch.zeros(0), None)
        advantages, chosen, divisor = self._early_advantages(), self._waiting, 1.0
        if self.is_scale_late and (is_last or self.is_complete):
            advantages, divisor = self.advantages(), batch_scale(self.samples, self.config)
        elif self.is_scale_late:
            largest = self._largest_unclamped()
            late = {index for index in self._waiting if max(map(abs, self._early[index])) > largest}
            groups = _groups(self.samples)
            kept = {groups[index] for index in late} if self.whole_groups else set()
            chosen = [index for index in self._waiting if index not in late and groups[index] not in kept]
            divisor = None
        given = {*chosen}
        self._waiting = [index for index in self._waiting if index not in given]
        return Ready(tuple(self.samples[index] for index in chosen), advantages[chosen], divisor)

    def advantages(self) -> Tensor:
        """Advantages of all samples that came, [samples] fp32, or [samples, K] with a tree, not clamped; the scale is
        theirs or the given one."""
        if self.is_scale_late:
            return self._advantages(self.samples, self.config.scale)
        return self._early_advantages()

    def _early_advantages(self) -> Tensor:
        early = torch.tensor(self._early)
        return early if any(sample.facts.nodes for sample in self.samples) else early.reshape(-1)

    def _advantages(self, samples: Sequence[FragmentSample], scale: str) -> Tensor:
        """Advantages [samples] fp32, or [samples, K] with a tree."""
        scaling = {"scale": scale, "ddof": self.config.ddof, "eps": self.config.eps}
        rewards, groups, nodes = _rewards(samples), _groups(samples), [sample.facts.nodes for sample in samples]
        if any(nodes):
            return tree_advantages(rewards, groups, nodes, **scaling)
        return group_advantages(rewards, groups, **scaling)

    def _largest_unclamped(self) -> float:
        """Largest centred reward that cannot be clamped, whatever rewards follow; -1 if the loss is not homogeneous.
        More rewards can only add to the sum of squares about the mean, and at most the planned samples arrive."""
        if not self.is_homogeneous:
            return -1.0
        least_scale = self._largest_scale
        if self.config.scale == "batch":
            rewards = _rewards(self.samples)
            squares = (rewards - rewards.mean()).square().sum().item()
            least_scale = math.sqrt(squares / (self.num_samples - self.config.ddof)) + self.config.eps
        return self.clip * least_scale * (1 - ROUNDING)


def batch_scale(samples: Sequence[FragmentSample], config: AdvantageConfig) -> float | None:
    """Divisor of the samples' centred rewards if they are a whole batch; None where a group has its own."""
    if config.scale not in BATCH_SCALES:
        return None
    scaling = {"scale": config.scale, "ddof": config.ddof, "eps": config.eps}
    return advantage_scale(_rewards(samples), _groups(samples), **scaling)[0].item()


def _rewards(samples: Sequence[FragmentSample]) -> Tensor:
    """[samples] fp64."""
    return torch.tensor([sample.reward for sample in samples], dtype=torch.float64)


def _groups(samples: Sequence[FragmentSample]) -> list[str]:
    """uid of each sample's group."""
    return [sample.facts.uid for sample in samples]
