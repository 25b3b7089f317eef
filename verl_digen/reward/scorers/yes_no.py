# SPDX-License-Identifier: Apache-2.0
"""Probability that a vision-language model says yes: P(Yes) / (P(Yes) + P(No)) at the first token of its answer.

The question is VQAScore's (Lin et al. 2024, arXiv:2404.01291), which takes P(Yes) of its own model; here both
answers are weighed against each other, so that a judge which also likes "The" is not punished. Range 0 to 1; detail
`share` is P(Yes) + P(No). The server must send log-probabilities (vLLM, SGLang and OpenAI do). An answer whose
likeliest tokens hold neither is a failure.
"""

from dataclasses import dataclass, field

from verl_digen.reward.scorers.judge import Question, QuestionConfig

QUESTION = 'Does this figure show "{prompt}"? Please answer yes or no.'


@dataclass(frozen=True)
class YesNoConfig(QuestionConfig):
    question: str = QUESTION
    """Text with {prompt}, {ground_truth} and {NAME} of further columns, to be answered with yes or no."""
    answers: dict[str, float] = field(default_factory=lambda: {"Yes": 1.0, "No": 0.0})
    """Answer -> value; for a question in another language."""
    max_tokens: int = 16
    """Maximum tokens of an answer. A judge that thinks first needs room for its thoughts."""


class YesNo(Question):
    name = "yes_no"
    config_class = YesNoConfig


REWARD = YesNo
