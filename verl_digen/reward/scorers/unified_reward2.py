# SPDX-License-Identifier: Apache-2.0
"""UnifiedReward 2.0: alignment, coherence and style of a picture, each from 1 to 5, by a model made for it.

Score: (mean of the three - 1) / 4, from 0 to 1; details `alignment`, `coherence`, `style` as the model gives them. A
video is asked about with 8 frames in one request, and has `physics` in place of `coherence`. Questions: those published
with the model (inference_qwen/UnifiedReward-2.0-inference of https://github.com/CodeGoat24/UnifiedReward,
point_score_ACS_image_generation.py and point_score_APS_video_generation.py), which are part of what it was trained on.

Models: CodeGoat24/UnifiedReward-2.0-qwen-3b, -7b, -32b, -72b (Qwen2.5-VL), -qwen3vl-* and -qwen35-* (MIT,
arXiv:2503.05236; the weights they were made from have licences of their own), served by vLLM.
"""

import re
from dataclasses import dataclass
from statistics import fmean

from verl_digen.reward.base import Result
from verl_digen.reward.judges.chat import JudgeConfig, SampleJudge
from verl_digen.reward.judges.reading import Reply, number_in
from verl_digen.types import RewardInput

HEAD = (
    "You are presented with a generated {kind} and its associated text caption. Your task is to analyze the {kind} "
    "across multiple dimensions in relation to the caption. Specifically:\n"
    "Provide overall assessments for the {kind} along the following axes (each rated from 1 to 5):\n"
)
IMAGE_AXES = (
    "- Alignment Score: How well the image matches the caption in terms of content.\n"
    "- Coherence Score: How logically consistent the image is (absence of visual glitches, object distortions, etc.).\n"
    "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.\n\n"
)
VIDEO_AXES = (
    "- Alignment Score: How well the video matches the caption in terms of content.\n"
    "- Physics Score: How well the gravity, movements, collisions, and interactions make physical sense.\n"
    "- Style Score: How visually appealing the video looks, regardless of caption accuracy.\n\n"
)
TAIL = (
    "Output your evaluation using the format below:\n\n"
    "Alignment Score (1-5): X\n"
    "{second} Score (1-5): Y\n"
    "Style Score (1-5): Z\n\n"
    "Your task is provided as follows:\n"
    "Text Caption: [{{prompt}}]"
)
IMAGE_QUESTION = HEAD.format(kind="image") + IMAGE_AXES + TAIL.format(second="Coherence")
VIDEO_QUESTION = HEAD.format(kind="video") + VIDEO_AXES + TAIL.format(second="Physics")
IMAGE_NAMES, VIDEO_NAMES = ("Alignment", "Coherence", "Style"), ("Alignment", "Physics", "Style")
LOW, HIGH = 1.0, 5.0


@dataclass(frozen=True)
class UnifiedReward2Config(JudgeConfig):
    question: str = IMAGE_QUESTION
    """Text with {prompt} for pictures; the answer must give "Alignment Score (1-5): X" and so on."""
    video_question: str = VIDEO_QUESTION
    """Text with {prompt} for videos, with "Physics" in place of "Coherence"."""
    questions = ("question", "video_question")


class UnifiedReward2(SampleJudge):
    name = "unified_reward2"
    config_class = UnifiedReward2Config

    async def judge(self, sample: RewardInput) -> Result:
        is_video = sample.pixels.ndim == 4
        question = self.question(sample.row, "video_question" if is_video else "question")
        names = VIDEO_NAMES if is_video else IMAGE_NAMES
        axes = await self.chat.ask(await self.frames(sample), question, lambda reply: axes_in(reply, names))
        return {"score": (fmean(axes.values()) - LOW) / (HIGH - LOW), **axes}


def axes_in(reply: Reply, names: tuple[str, ...]) -> dict[str, float]:
    """Axis in small letters -> its number. UnusableAnswer if one of them is missing, or outside [1, 5]."""
    patterns = {name.lower(): re.compile(rf"{name} Score \(1-5\):\s*(\d+(?:\.\d+)?)") for name in names}
    return {axis: number_in(reply, pattern, LOW, HIGH, takes_last=True) for axis, pattern in patterns.items()}


REWARD = UnifiedReward2
