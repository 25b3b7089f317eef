# SPDX-License-Identifier: Apache-2.0
"""Which samples of a logical batch can train already, and with what advantages, while rewards still come in.

A group is complete when it arrives, so its mean is known; what the centred reward is divided by may not be:

| `digen.advantage.scale` | known | a sample trains at once |
| --- | --- | --- |
| group, none | with the group | yes, with its advantage |
| batch, max_group | with the last group | with the centred reward; the gradient is divided by the scale afterwards |

The second row is exact while the loss is homogeneous in the advantage and clamping (`digen.loss.advantage_clip`)
does not bind. So, until the scale is known, these are held back and trained with their advantages then:

- samples that might be clamped. The scale can only turn out larger than the rewards so far make sure: it is at least
  sqrt(sum of squares of those so far / planned samples), or the largest group's so far. A sample whose centred reward
  is within the clip times that bound cannot be clamped. The bound rises, and samples held back are let go;
- everything, where the loss is not homogeneous: training then starts with the last group.

Invariants (tests/engine/test_ledger.py): every sample is given out exactly once; what is given out before the scale
is known, divided by it, is the advantage that the loss would clamp, which it leaves alone; a group comes once.

Example, scale "batch", clip 5:
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=4, clip=5.0, is_homogeneous=True)
    ledger.add(["a0", "a1"], ["a", "a"], [1.0, 0.0])
    ledger.take()    # Ready(("a0", "a1"), [0.5, -0.5], divisor=None): to be divided by the scale
    ledger.add(["b0", "b1"], ["b", "b"], [0.0, 0.0])
    ledger.take()    # Ready(("b0", "b1"), [0, 0], divisor=0.4331): advantages; earlier gradients are divided by it
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_digen.algorithms.advantages import advantage_scale, group_advantages
from verl_digen.config import AdvantageConfig

ROUNDING = 1e-6
"""How far within the clip a sample must be to count as unclamped: more than fp32 errs, less than anyone sees."""


@dataclass(frozen=True)
class Ready:
    """Samples that train now."""

    keys: tuple[str, ...]
    advantages: Tensor
    """[n] fp32: advantages, or centred rewards while `divisor` is unknown."""
    divisor: float | None
    """None: the gradient of these is to be divided by the scale later. Else it is known: these advantages are divided
    already, and the gradient of all that came earlier with None is to be divided by it now."""


class AdvantageLedger:
    """The rewards of one logical batch. See the module.

    Args:
        num_samples: how many samples the batch will have at most; the batch is complete when they are there.
        clip: `digen.loss.advantage_clip`.
        is_homogeneous: whether the loss is, see `verl_digen.algorithms.losses`.
    """

    def __init__(self, config: AdvantageConfig, num_samples: int, clip: float, is_homogeneous: bool):
        self.config, self.num_samples, self.clip, self.is_homogeneous = config, num_samples, clip, is_homogeneous
        self.keys: list[str] = []
        self.groups: list[str] = []
        self.rewards: list[float] = []
        self._early: list[float] = []
        """What each sample trains with as soon as its group is known: its advantage, or its centred reward."""
        self._largest_scale = 0.0
        """Of the groups so far, under max_group."""
        self._waiting: list[int] = []

    @property
    def held(self) -> tuple[str, ...]:
        """The keys of samples that are held back, or were not taken yet."""
        return tuple(self.keys[index] for index in self._waiting)

    @property
    def is_complete(self) -> bool:
        """Whether every planned sample is there."""
        return len(self.keys) == self.num_samples

    @property
    def is_scale_late(self) -> bool:
        """Whether only the whole batch says what centred rewards are divided by."""
        return self.config.scale in ("batch", "max_group")

    @property
    def waits_for_batch(self) -> bool:
        """Whether nothing can train before the batch is complete."""
        return self.is_scale_late and not self.is_homogeneous

    def add(self, keys: Sequence[str], groups: Sequence[str], rewards: Sequence[float]) -> None:
        """Complete groups: the key, the group and the reward of each sample.

        Raises:
            RuntimeError: a group or a sample came before, or there are more samples than planned; nothing is added.
        """
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
        self._early += self._advantages(rewards, groups, "none" if self.is_scale_late else self.config.scale).tolist()
        if self.config.scale == "max_group":
            self._largest_scale = max(self._largest_scale, self._scale(rewards, groups))
        self._waiting += range(len(self.keys), len(self.keys) + len(keys))
        self.keys += keys
        self.groups += groups
        self.rewards += rewards

    def take(self, *, is_last: bool = False) -> Ready:
        """The samples that can train now; they are given out by this call.

        Args:
            is_last: no more groups will come (some were dropped, say), so all is known.
        """
        if not self.keys:
            return Ready((), torch.zeros(0), None)
        advantages, chosen, divisor = torch.tensor(self._early), self._waiting, 1.0
        if self.is_scale_late and (is_last or self.is_complete):
            advantages = self._advantages(self.rewards, self.groups, self.config.scale)
            divisor = self._scale(self.rewards, self.groups)
        elif self.is_scale_late:
            largest = self._largest_unclamped()
            chosen = [index for index in self._waiting if abs(self._early[index]) <= largest]
            divisor = None
        given = {*chosen}
        self._waiting = [index for index in self._waiting if index not in given]
        return Ready(tuple(self.keys[index] for index in chosen), advantages[chosen], divisor)

    def _advantages(self, rewards: Sequence[float], groups: Sequence[str], scale: str) -> Tensor:
        """[samples] fp32."""
        config, values = self.config, torch.tensor(rewards, dtype=torch.float64)
        return group_advantages(values, groups, scale=scale, ddof=config.ddof, eps=config.eps)

    def _scale(self, rewards: Sequence[float], groups: Sequence[str]) -> float:
        """What these would be divided by, were they the whole batch."""
        config, values = self.config, torch.tensor(rewards, dtype=torch.float64)
        return advantage_scale(values, groups, scale=config.scale, ddof=config.ddof, eps=config.eps)[0].item()

    def _largest_unclamped(self) -> float:
        """The centred reward up to which no clamping can bind, whatever rewards come; less than any if not known.

        More rewards can only add to the sum of squares about the mean, and there will be no more than planned.
        """
        if not self.is_homogeneous:
            return -1.0
        least_scale = self._largest_scale
        if self.config.scale == "batch":
            rewards = torch.tensor(self.rewards, dtype=torch.float64)
            squares = (rewards - rewards.mean()).square().sum().item()
            least_scale = math.sqrt(squares / max(self.num_samples - self.config.ddof, 1)) + self.config.eps
        return self.clip * least_scale * (1 - ROUNDING)
