# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward 1.5: alignment and quality of a picture, from 1 to 5, by a vision-language model made for it.

Question, size and form of the answer are flow_grpo's (`unifiedreward_score_sglang` in flow_grpo/rewards.py of
https://github.com/yifan123/flow_grpo): a PNG of 512 x 512 px whatever its shape, temperature 0, the number behind
"Final Score:", divided by 5: 0.2 to 1. flow_grpo puts "<image>" before the question; servers do that themselves. There
an answer without a score counts 0, here it is a failure. A video gets the mean over its frames.

Model: CodeGoat24/UnifiedReward-7b-v1.5 (LLaVA-OneVision; MIT, arXiv:2503.05236), served by SGLang or vLLM.
"""

import re
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated

from PIL import Image

from verl_digen.require import In
from verl_digen.reward.base import Result, images_of
from verl_digen.reward.judges.chat import MAX_SIDE_PX, JudgeConfig, SampleJudge, picture_parts
from verl_digen.reward.judges.reading import number_in
from verl_digen.types import RewardInput

QUESTION = (
    "You are given a text caption and a generated image based on that caption. Your task is to evaluate this image "
    "based on two key criteria:\n"
    "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the accuracy "
    "of depicted objects, their relationships, and attributes as described in the caption.\n"
    "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail preservation, color "
    "accuracy, and overall aesthetic appeal.\n"
    "Based on the above criteria, assign a score from 1 to 5 after 'Final Score:'.\n"
    "Your task is provided as follows:\n"
    "Text Caption: [{prompt}]"
)
FINAL_SCORE = re.compile(r"Final Score:\s*(\d+(?:\.\d+)?)")
"""A number of any size, so that "Final Score: 10" is an error and not a 1."""
LOW, HIGH = 1.0, 5.0


@dataclass(frozen=True)
class UnifiedRewardConfig(JudgeConfig):
    question: str = QUESTION
    """Text with {prompt}; the answer must give a number after 'Final Score:'."""
    size_px: Annotated[int, In(f"[0, {MAX_SIDE_PX}]")] = 512
    """Width and height to which a picture is brought; 0 keeps its size, at most `max_px`."""
    num_frames: int = 4
    """Maximum frames of a video, each of which is asked about."""


class UnifiedReward(SampleJudge):
    name = "unified_reward"
    config_class = UnifiedRewardConfig

    async def judge(self, sample: RewardInput) -> Result:
        question = self.question(sample.row)
        frames = images_of(sample, self.config.num_frames)
        numbers = await self.chat.all(self._number(frame, question) for frame in frames)
        return fmean(numbers) / HIGH

    async def _number(self, frame: Image.Image, question: str) -> float:
        size = self.config.size_px
        image = frame.resize((size, size)) if size else frame
        return await self.chat.ask(
            await picture_parts([image], size or self.config.max_px),
            question,
            lambda reply: number_in(reply, FINAL_SCORE, LOW, HIGH, takes_last=False),
        )


REWARD = UnifiedReward
