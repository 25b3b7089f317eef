# SPDX-License-Identifier: Apache-2.0
"""`Judge`: a reward that asks a vision-language model about pictures, over the OpenAI chat protocol.

- How it asks, and what it does with an answer that gives no score: `verl_digen/reward/judges/chat.py`. A sample without
  a usable answer fails; it never gets a 0.

Invariants (tests/reward/judges/test_asking.py): a request has temperature 0; its pictures are the sample's, within
`max_px`; what the judge may not be used for fails.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar, cast

import torch

from verl_digen.reward.base import Result, Reward
from verl_digen.reward.judges.chat import ChatModel, JudgeConfig
from verl_digen.types import RewardInput

T = TypeVar("T")


class Judge(Reward):
    """See the module; a subclass says what is asked and how it is read."""

    name: ClassVar[str]
    """Name for messages."""
    config_class: ClassVar[type] = JudgeConfig

    def __init__(self, config: JudgeConfig, device: torch.device):
        super().__init__(config, device)
        self.chat = ChatModel(config, self.name)

    def take_counts(self) -> Mapping[str, int]:
        """Retries of requests since the last time."""
        return self.chat.take_counts()


class SampleJudge(Judge):
    """A judge of single samples."""

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result | Exception]:
        """Score samples at the same time."""
        found = await self.chat.outcomes(self.judge(sample) for sample in batch)
        return [one if isinstance(one, Exception) else cast(Result, one) for one in found]

    @abstractmethod
    async def judge(self, sample: RewardInput) -> Result:
        """Score one sample."""
