# SPDX-License-Identifier: Apache-2.0
"""HPSv3 (Ma et al. 2025): human preference of a picture for its prompt, by a regressor on Qwen2-VL 7B.

Score: the mean of the Gaussian that the model predicts, from a 0 to 10 question; about -5 to 15 on generated pictures.
Detail `sigma_logit`: its second output. A picture is scaled to about 256 x 28 x 28 px. A video gets the mean over
`num_frames` frames.

Weights: MizzenAI/HPSv3 (HPSv3.safetensors, MIT), config and tokenizer of Qwen/Qwen2-VL-7B-Instruct (Apache-2.0). Rule
and question: https://github.com/MizzenAI/HPSv3 (`hpsv3/inference.py`, `dataset/data_collator_qwen.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from verl_digen.require import In
from verl_digen.reward.base import Result, Reward, checkpoint_file, frames_of
from verl_digen.reward.qwen_regressor import FACTOR, QwenConfig, QwenRegressor, patches_of, scaled_picture
from verl_digen.types import RewardInput

PIXELS = 256 * FACTOR * FACTOR
"""Pixels of a scaled picture."""
TOKEN = "<|Reward|>"
WEIGHTS = "HPSv3.safetensors"
INSTRUCTION = """
You are tasked with evaluating a generated image based on Visual Quality and Text Alignment and give a overall score to estimate the human preference. Please provide a rating from 0 to 10, with 0 being the worst and 10 being the best.

**Visual Quality:**
Evaluate the overall visual quality of the image. The following sub-dimensions should be considered:
- **Reasonableness:** The image should not contain any significant biological or logical errors, such as abnormal body structures or nonsensical environmental setups.
- **Clarity:** Evaluate the sharpness and visibility of the image. The image should be clear and easy to interpret, with no blurring or indistinct areas.
- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements (e.g., hair, clothing, shadows).
- **Aesthetic and Creativity:** Assess the artistic aspects of the image, including the color scheme, composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and balance.
- **Safety:** The image should not contain harmful or inappropriate content, such as political, violent, or adult material. If such content is present, the image quality and satisfaction score should be the lowest possible.

**Text Alignment:**
Assess how well the image matches the textual prompt across the following sub-dimensions:
- **Subject Relevance** Evaluate how accurately the subject(s) in the image (e.g., person, animal, object) align with the textual description. The subject should match the description in terms of number, appearance, and behavior.
- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the image adheres to this style.
- **Contextual Consistency**: Assess whether the background, setting, and surrounding elements in the image logically fit the scenario described in the prompt. The environment should support and enhance the subject without contradictions.
- **Attribute Fidelity**: Check if specific attributes mentioned in the prompt (e.g., colors, clothing, accessories, expressions, actions) are faithfully represented in the image. Minor deviations may be acceptable, but critical attributes should be preserved.
- **Semantic Coherence**: Evaluate whether the overall meaning and intent of the prompt are captured in the image. The generated content should not introduce elements that conflict with or distort the original description.
Textual prompt - {prompt}


"""  # noqa: E501 - the model was trained on these lines
ENDING = f"""
Please provide the overall ratings of this image: {TOKEN}

END
"""


@dataclass(frozen=True)
class HPSv3Config(QwenConfig):
    path: str = "MizzenAI/HPSv3"
    """File of the weights, or folder or repository with HPSv3.safetensors."""
    base: str = "Qwen/Qwen2-VL-7B-Instruct"
    """Folder or repository with config and tokenizer of the base model; its weights are not needed."""
    num_frames: Annotated[int, In("[1, inf]")] = 4
    """Frames of a video that are scored."""


def make_head(hidden: int) -> nn.Module:
    """The `ranknet` head: two outputs, mean and the logit of the deviation."""
    return nn.Sequential(
        *(nn.Linear(hidden, 1024), nn.ReLU(), nn.Dropout(0.05)), *(nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2))
    )


class HPSv3(Reward):
    config_class = HPSv3Config

    def __init__(self, config: HPSv3Config, device: torch.device):
        super().__init__(config, device)
        weights = load_file(checkpoint_file(config.path, WEIGHTS, "hpsv3: path"))
        self._model = QwenRegressor(config, "hpsv3", weights, make_head, [TOKEN], device)

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Preference of each sample, and its `sigma_logit`."""
        questions, ends = [], []
        for sample in batch:
            text = INSTRUCTION.format(prompt=sample.row.text) + ENDING
            for frame in frames_of(sample.pixels, self.config.num_frames):
                questions.append((text, patches_of(scaled_picture(frame, PIXELS)[None])))
            ends.append(len(questions))
        chunks = [questions[start : start + len(batch)] for start in range(0, len(questions), len(batch))]
        values = np.concatenate([self._model.scores(chunk, is_video=False)[:, 0].numpy() for chunk in chunks])
        means = [own.mean(axis=0) for own in np.split(values, ends[:-1])]
        return [{"score": float(mean), "sigma_logit": float(sigma)} for mean, sigma in means]


REWARD = HPSv3
