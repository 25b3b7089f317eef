# SPDX-License-Identifier: Apache-2.0
"""Win rate within a group: a vision-language model compares samples of a prompt two at a time (Pref-GRPO,
arXiv:2508.20751; https://github.com/CodeGoat24/Pref-GRPO).

The score of a sample is the mean over its comparisons of the probability that it is the better one, 0 to 1; the mean of
a group is 0.5. Each pair is asked about in both orders (`both_orders`), because judges prefer a place. With `logprobs`
an answer gives P(first) / (P(first) + P(second)) at the first token, answers `first` and `second` being one token each;
else its text must hold one of them, as UnifiedReward-Think's "Image 1 is better".

With all pairs a group of G costs G (G - 1) requests (552 for 24); `rounds` R costs 2 G R. The judge sees the pictures
that the prompt is about, the first sample, the second sample, then the question. Model and licence are yours to choose.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Annotated

from verl_digen.require import In
from verl_digen.reward.base import Result
from verl_digen.reward.judges.chat import MAX_TOP_LOGPROBS, Judge, JudgeConfig, Part
from verl_digen.reward.judges.reading import preferred, require_distinct, weighed
from verl_digen.types import RewardInput

QUESTION = (
    "Two pictures were made for the same text. The last two pictures that you see are picture 1 and picture 2.\n"
    "Text: {prompt}\n"
    "Which picture shows what the text says more completely and is of better quality? Answer with 1 or 2, nothing else."
)
Pair = tuple[int, int]
"""Positions of two samples of a group, in the order in which the judge sees them."""


@dataclass(frozen=True)
class WinRateConfig(JudgeConfig):
    question: str = QUESTION
    """Text with {prompt}, {ground_truth} and {NAME} of further columns; other braces are written twice."""
    first: str = "1"
    """Answer for the first sample."""
    second: str = "2"
    """Answer for the second sample."""
    logprobs: bool = True
    """Weigh the two answers by their probability; false looks for them in the text."""
    both_orders: bool = True
    """Ask about every pair in both orders; false asks in a random one."""
    rounds: Annotated[int, In("[0, 10000]"), "0 for all pairs"] = 0
    """Neighbours on either side, in a random circle, that a sample meets; 0: everybody meets everybody."""
    max_tokens: int = 16
    """Maximum tokens of an answer. A judge that thinks first needs room for its thoughts."""
    num_frames: int = 4
    """Maximum frames of each of two videos."""
    with_images: bool = True
    """Show the pictures that the prompt is about, before the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_distinct({self.first: 1.0, self.second: 0.0}, "first and second")


class WinRate(Judge):
    name = "win_rate"
    scope = "group"
    config_class = WinRateConfig

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Win rates of a group; the same pairs whenever it is scored."""
        config, row = self.config, batch[0].row
        pairs = pairs_of(len(batch), config.rounds, random.Random(f"{config.seed}/{row.uid}"))
        if config.both_orders:
            pairs += [(second, first) for first, second in pairs]
        question = self.question(row)
        before = await self.sources(batch[0]) if config.with_images else []
        frames = [await self.frames(sample) for sample in batch]
        outcomes = await self.chat.all(self._outcome([*before, *frames[i], *frames[j]], question) for i, j in pairs)
        return win_rates(len(batch), dict(zip(pairs, outcomes, strict=True)))

    async def _outcome(self, pictures: Sequence[Part], question: str) -> float:
        """Probability that the first sample is better."""
        config = self.config
        if not config.logprobs:
            return await self.chat.ask(pictures, question, lambda reply: preferred(reply, config.first, config.second))
        values = {config.first: 1.0, config.second: 0.0}
        return await self.chat.ask(
            pictures, question, lambda reply: weighed(reply, values)["score"], top_logprobs=MAX_TOP_LOGPROBS
        )


def pairs_of(num_samples: int, rounds: int, rng: random.Random) -> list[Pair]:
    """Pairs that meet, each in a random order; no pair twice, equally many opponents for all.

    With R = `rounds` the samples stand in a circle in random order, and each meets its R next neighbours on either
    side. So everybody has 2R opponents. 0, or enough for a full round robin, gives all pairs.

    Example:
        pairs_of(3, 0, random.Random(0))  # (0, 1), (0, 2), (1, 2), some of them turned around
    """
    if rounds == 0 or 2 * rounds >= num_samples - 1:
        found = list(combinations(range(num_samples), 2))
    else:
        circle = rng.sample(range(num_samples), num_samples)
        found = [
            (circle[place], circle[(place + step) % num_samples])
            for place in range(num_samples)
            for step in range(1, rounds + 1)
        ]
    return [(first, second) if rng.random() < 0.5 else (second, first) for first, second in found]


def win_rates(num_samples: int, outcomes: Mapping[Pair, float]) -> list[float]:
    """Mean outcome of each sample over its comparisons. `outcomes`: pair -> probability that its first sample is
    better, 0 to 1. RuntimeError if a sample has no comparison."""
    won: list[list[float]] = [[] for _ in range(num_samples)]
    for (first, second), outcome in outcomes.items():
        won[first].append(outcome)
        won[second].append(1.0 - outcome)
    if not all(won):
        raise RuntimeError(f"every sample must be compared, got {outcomes!r} for {num_samples} samples")
    return [sum(outcome) / len(outcome) for outcome in won]


REWARD = WinRate
