# SPDX-License-Identifier: Apache-2.0
"""A question of your own to a vision-language model, over the OpenAI chat protocol: a number in the answer, or the
probability of answers.

    pattern   a regular expression whose first group is a number in [low, high]; of several matches the last one counts.
              score = (number - low) / (high - low), from 0 to 1; detail `number`
    answers   answers of one token each, with their values: the expected value by the probabilities of the first token
              (verl_digen/reward/judges/reading.py), in the range of the values; detail `share`, their probability

The judge sees the pictures that the prompt is about, then the sample, then the question. Model and licence are yours to
choose: it is whatever the server at `url` serves.
"""

import re
from dataclasses import dataclass, field
from typing import Annotated

from verl_digen.require import In, refusing, require
from verl_digen.reward.base import Result
from verl_digen.reward.judges.chat import MAX_TOP_LOGPROBS, JudgeConfig, SampleJudge
from verl_digen.reward.judges.reading import number_in, require_distinct, weighed
from verl_digen.types import RewardInput


@dataclass(frozen=True)
class QuestionConfig(JudgeConfig):
    pattern: str = ""
    """Regular expression whose first group is the number, e.g. 'Score: (\\d+)'. This or `answers`."""
    low: float = 0.0
    """Smallest number that the answer may give; score 0."""
    high: float = 0.0
    """Largest number that the answer may give; score 1."""
    answers: dict[str, float] = field(default_factory=dict)
    """Answer -> value, e.g. {Yes: 1, No: 0}. This or `pattern`."""
    top_logprobs: Annotated[int, In(f"[1, {MAX_TOP_LOGPROBS}]")] = MAX_TOP_LOGPROBS
    """Likeliest tokens that are asked for with `answers`; services have limits of their own below the protocol's 20."""
    with_images: bool = True
    """Show the pictures that the prompt is about, before the sample."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(bool(self.question), "question must be a text", self.question, "e.g. 'Does it show {prompt}?'")
        require(
            bool(self.pattern) != bool(self.answers),
            "pattern or answers must be given, and not both",
            [self.pattern, dict(self.answers)],
            "a pattern reads a number, answers are weighed by their probability",
        )
        if self.pattern:
            with refusing("pattern must be a regular expression", self.pattern, "repair it"):
                groups = re.compile(self.pattern).groups
            require(
                groups >= 1, "pattern must have a group, which finds the number", self.pattern, r"e.g. 'Score: (\d+)'"
            )
            require(
                self.low < self.high,
                "low must be below high, the range of the numbers that the question asks for",
                [self.low, self.high],
                "set both, e.g. low: 1, high: 10",
            )
        else:
            require_distinct(self.answers, "answers")


class Question(SampleJudge):
    name = "judge"
    config_class = QuestionConfig

    async def judge(self, sample: RewardInput) -> Result:
        config, question = self.config, self.question(sample.row)
        pictures = [*(await self.sources(sample) if config.with_images else ()), *await self.frames(sample)]
        if config.answers:
            return await self.chat.ask(
                pictures, question, lambda reply: weighed(reply, config.answers), top_logprobs=config.top_logprobs
            )
        pattern = re.compile(config.pattern)
        number = await self.chat.ask(
            pictures, question, lambda reply: number_in(reply, pattern, config.low, config.high, takes_last=True)
        )
        return {"score": (number - config.low) / (config.high - config.low), "number": number}


REWARD = Question
