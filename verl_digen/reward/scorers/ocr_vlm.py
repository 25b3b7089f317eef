# SPDX-License-Identifier: Apache-2.0
"""Text in a picture, read by a vision-language model and compared with the text that the prompt asks for.

Score: `text_reward` of `ocr`, 0 to 1. The question is the one that Qwen's OCR models are asked by default. An answer
that says nothing means that there is no text, and has score 0; one that was cut off at `max_tokens` is compared up to
there. Model: any that reads, e.g. Qwen/Qwen2.5-VL-7B-Instruct (Apache 2.0), served by vLLM or SGLang.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from verl_digen.reward.base import Result
from verl_digen.reward.judges.chat import JudgeConfig, SampleJudge
from verl_digen.reward.scorers.ocr import text_reward, text_target
from verl_digen.types import PromptRow, RewardInput

QUESTION = "Please output only the text content from the image without any additional descriptions or formatting."


@dataclass(frozen=True)
class OcrVlmConfig(JudgeConfig):
    question: str = QUESTION
    """Text that asks for the picture's text and nothing else."""
    max_tokens: int = 512
    """Maximum tokens of an answer; noise can make a judge repeat itself without end."""
    num_frames: int = 4
    """Maximum frames of a video, each of which is read."""


class OcrVlm(SampleJudge):
    name = "ocr_vlm"
    config_class = OcrVlmConfig
    packages = ("rapidfuzz",)

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        super().check_row(arguments, row)
        text_target(row.text)

    async def judge(self, sample: RewardInput) -> Result:
        target = text_target(sample.row.text)
        question, frames = self.question(sample.row), await self.frames(sample)
        read = await self.chat.all(self.chat.ask([frame], question, lambda reply: reply.text) for frame in frames)
        return fmean(text_reward(text, target) for text in read)


REWARD = OcrVlm
