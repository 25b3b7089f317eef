# SPDX-License-Identifier: Apache-2.0
"""Sub-group accumulators: the gradient of samples that train before their group is complete.

While the ratio is exactly 1 the policy gradient is linear in the advantage (`Loss.linear`). With rewards r_i, the
group's mean m, a baseline b (the mean of the first part's rewards) and the gradient g_i of sample i with advantage 1:

    sum of (r_i - m) g_i  =  sum of (r_i - b) g_i  +  (b - m) sum of g_i
                             `weighted`                       `plain`

Without the baseline, rewards that are large against their spread would round the difference away.

    part of a group   train(...): one forward and backward per tile; `weighted`, `plain` and `fixed` grow
    group complete    join(...): the sum is divided by the scale, if known, and added to the batch's gradient
    group dropped     the accumulators are dropped; nothing of them was in the batch's gradient

- A tile has rows of one sample. So with unreduced gradients (`digen.tsp.reduce` fragment and batch) one backward gives
  g_i, which is added to both accumulators. With `tile` ranks reduce gradients of different samples at once: each takes
  a second backward over the same graph, weighted before the reduction.
- The gradient of terms without advantages (KL) is apart in `fixed`, by a backward of its own.
- A loss's metrics depend on the sign of the advantage alone (apart from `policy_loss`), so they are taken for each
  sign, and the final sign picks one.
- An advantage that turns out to be clamped is corrected, see `GradientTransaction.run`.

Invariant (tests/engine/test_parts.py, test_properties.py): the committed gradient is that of whole groups, whatever the
parts, their order and what comes in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verl_digen.algorithms.metric import Metric
from verl_digen.config import DigenConfig
from verl_digen.engine import gradients
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.gradients import Gradient
from verl_digen.engine.loss import LossTerms

SIGNS = (1, 0, -1)
"""Signs of an advantage."""


def open_gradients(digen: DigenConfig) -> int:
    """Gradients that a rank may keep at once: the batch's, and the accumulators of a group."""
    return (3 + (digen.kl.coef > 0)) if digen.gap.subgroups else 1


@dataclass(frozen=True)
class PartTile:
    """A tile of a part that trained."""

    key: str
    """Its sample."""
    terms: Mapping[int, LossTerms]
    """Sign -> terms with that advantage, without graph."""

    def with_advantage(self, advantage: float) -> LossTerms:
        """The terms with the sample's final advantage, or centred reward."""
        sign = (advantage > 0) - (advantage < 0)
        scaled = self.terms[1].scaled * advantage
        metrics = {**self.terms[sign].metrics, "policy_loss": Metric(scaled)}
        return LossTerms(scaled, self.terms[sign].fixed, metrics)


@dataclass
class PartialGroup:
    """A group of which samples trained before it is complete."""

    uid: str
    baseline: float
    samples: dict[str, FragmentSample] = field(default_factory=dict)
    """Samples that trained, by key."""
    weighted: Gradient = field(default_factory=dict)
    plain: Gradient = field(default_factory=dict)
    fixed: Gradient = field(default_factory=dict)
    tiles: list[PartTile] = field(default_factory=list)
    """This rank's."""
    num_rows: int = 0
    """Unmasked rows, over all ranks."""
    num_prompt_tokens: int = 0
    """Prompt tokens of this rank's unmasked rows."""

    @classmethod
    def begin(cls, uid: str, samples: Sequence[FragmentSample]) -> PartialGroup:
        """A group whose first part is these samples."""
        return cls(uid, sum(sample.reward for sample in samples) / len(samples))

    @property
    def accumulators(self) -> tuple[Gradient, ...]:
        """All three."""
        return self.weighted, self.plain, self.fixed

    def weight(self, sample: FragmentSample) -> float:
        """Factor of the sample's gradient in `weighted`."""
        return sample.reward - self.baseline

    def policy_gradient(self, mean: float, divisor: float) -> Gradient:
        """The gradient of the samples that trained, with advantages (r - mean) / divisor; takes over `weighted`."""
        gradients.add_multiple_(self.weighted, self.plain, self.baseline - mean)
        gradients.scale_(self.weighted, 1 / divisor)
        return self.weighted

    def check_complete(self, samples: Sequence[FragmentSample]) -> None:
        """Require that a complete group has the samples that trained, as they were.

        Raises:
            RuntimeError: it has not.
        """
        rewards = {sample.key: sample.reward for sample in samples if sample.uid == self.uid}
        for key, trained in self.samples.items():
            if rewards.get(key) != trained.reward:
                raise RuntimeError(
                    f"sample {key} trained before its group {self.uid} was complete, with reward {trained.reward}, and "
                    f"must be in the complete group with it, got {rewards.get(key)}; hand over the same sample again"
                )
