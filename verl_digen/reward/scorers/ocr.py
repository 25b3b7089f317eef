# SPDX-License-Identifier: Apache-2.0
"""OCR: does a picture show the text that its prompt asks for, as rapidocr reads it. Reward: `text_reward`, 0 to 1.

The target is the row's ground truth where it is a text of its own (the quoted part of an OCR prompt, see
`verl_digen.data.prompts`), else the quoted part of the prompt. rapidocr's lines are joined in its order without a
space; its classifier, which turns lines by 180 degrees, is off, as in flow_grpo. Of a video `frames=mean_read` takes
the mean over frames with a reward above 0, flow_grpo's rule; `mean` counts all of them; `best` takes the best one.
Detail `read_length`: characters read without spaces, mean over the frames.

rapidocr reads one picture at a time, and lines of several pictures in one batch would change what it reads; so a batch
is read picture by picture. More pictures per second: more workers of the pool, each with an engine of its own, and the
settings of `OcrConfig`. flow_grpo reads with PaddleOCR 2.9, so its numbers are not the same on doubtful pictures.

Weights: PP-OCRv6 small (detection 10 MB, recognition 21 MB) of PaddleOCR as ONNX, in rapidocr's wheel; Apache-2.0.
Sources: flow_grpo/ocr.py of https://github.com/yifan123/flow_grpo, https://github.com/RapidAI/RapidOCR.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image, ImageDraw

from verl_digen.data.prompts import quoted_text
from verl_digen.require import In, OneOf, require
from verl_digen.reward.base import Result, Reward, images_of, imported
from verl_digen.types import PromptRow, RewardInput

FRAMES = ("mean_read", "mean", "best")
"""Values of `OcrConfig.frames`."""
LINE_HEIGHT_PX = 48
"""Height to which rapidocr scales a line before it reads it."""


@dataclass(frozen=True)
class OcrConfig:
    detect: bool = True
    """False reads the whole picture as one line, which is faster: for pictures of a single line that fills them."""
    detection_side_px: Annotated[int, In("[32, inf]")] = 736
    """A shorter side is enlarged to this many pixels before lines are looked for. rapidocr's `Det.limit_side_len`, and
    its default. Small pictures of large letters are read as well without enlarging, and many times as fast; a long and
    thin picture becomes huge with it."""
    line_width_px: Annotated[int, In(f"[{LINE_HEIGHT_PX}, inf]")] = 320
    """Width to which a shorter line is padded, at a height of 48 px. rapidocr's `Rec.rec_img_shape`, and its default;
    short words are read in less time with less."""
    num_frames: Annotated[int, In("[1, inf]")] = 8
    """Frames that are read of a video."""
    frames: Annotated[str, OneOf(FRAMES)] = "mean_read"
    """Reward of a video: mean_read, mean or best; see the module."""


class Ocr(Reward):
    config_class = OcrConfig
    packages = ("rapidocr", "onnxruntime", "rapidfuzz")

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        target_of(row)

    def __init__(self, config: OcrConfig, device: torch.device):
        super().__init__(config, device)
        rapidocr = imported("rapidocr", "ocr")
        self._engine = rapidocr.RapidOCR(params=engine_parameters(config))
        page = Image.new("RGB", (96, 32), "white")
        ImageDraw.Draw(page).text((16, 4), "OCR", fill="black", font_size=24)
        self.read(page)  # loads all weights, or fails before the first sample

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Reward and `read_length` of each sample."""
        return [self._score_one(sample) for sample in batch]

    def read(self, image: Image.Image) -> str:
        """The text of a picture, as rapidocr reads it; "" if there is none."""
        lines: Any = self._engine(image)
        return "".join(lines.txts) if lines.txts else ""

    def _score_one(self, sample: RewardInput) -> Result:
        target = target_of(sample.row)
        texts = [self.read(image) for image in images_of(sample, self.config.num_frames)]
        rewards = [text_reward(text, target) for text in texts]
        lengths = [len(text.replace(" ", "")) for text in texts]
        return {"score": combined(rewards, self.config.frames), "read_length": float(np.mean(lengths))}


def engine_parameters(config: OcrConfig) -> dict[str, Any]:
    """rapidocr's own names of the settings."""
    return {
        "Global.log_level": "error",  # it warns about every page without text
        "Global.use_cls": False,
        "Global.use_det": config.detect,
        "Det.limit_side_len": config.detection_side_px,
        "Rec.rec_img_shape": [3, LINE_HEIGHT_PX, config.line_width_px],
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,  # a core does more with an engine of its own
        "EngineConfig.onnxruntime.inter_op_num_threads": 1,
    }


def target_of(row: PromptRow) -> str:
    """The text that a sample is to show; see the module. ValueError if the ground truth is no text, or it is the
    prompt, and the prompt quotes nothing."""
    if row.ground_truth is None or row.ground_truth == row.text:
        return text_target(row.text)
    require(
        isinstance(row.ground_truth, str) and row.ground_truth.strip() != "",
        "ocr: reward_model.ground_truth must be the text to show",
        row.ground_truth,
        "write a string, or leave it out and quote the text in the prompt",
    )
    return row.ground_truth


def combined(rewards: Sequence[float], how: str) -> float:
    """The reward of a video from its frames' rewards; see the module for `how`. With one frame it is that frame's.

    Example:
        combined([0.0, 0.5, 1.0], "mean_read")  # 0.75
    """
    if how == "best":
        return max(rewards)
    counted = [reward for reward in rewards if reward > 0 or how == "mean"]
    return float(np.mean(counted)) if counted else 0.0


REWARD = Ocr


def text_target(prompt: str) -> str:
    """The text that a prompt asks for: its first part in double quotes, as it stands there. ValueError without such a
    part.

    Example:
        text_target('a shop sign that says "Open Now"')  # 'Open Now'
    """
    quoted = quoted_text(prompt)
    rule = "a prompt of a text reward must have the text to show in double quotes"
    require(bool(quoted.strip()), rule, prompt[:200], "quote it, or give it as the row's ground truth")
    return quoted


def text_reward(read: str, target: str) -> float:
    """How well a text that was read matches the text that a prompt asks for: flow_grpo's OCR reward, without the OCR.

        reward = 1 - min(distance, len(target)) / len(target), in 0..1

    Both texts are lower-cased and lose their spaces (U+0020); any other character counts, line breaks too. The distance
    is 0 where the target is a part of what was read, else Levenshtein's. So further text beside the right one costs
    nothing, and an empty page has reward 0. ValueError if the target has no character but spaces, or rapidfuzz is not
    installed.

    Example:
        text_reward("open n0w", "Open Now")  # 1 - 1 / 7
    """
    wanted = _plain(target)
    require(
        bool(wanted),
        "the target of a text reward must have a character that is not a space",
        target,
        "write the text to show in double quotes in the prompt, or as the row's ground truth",
    )
    found = _plain(read)
    if wanted in found:
        return 1.0
    levenshtein = imported("rapidfuzz.distance.Levenshtein", "of texts (ocr and judges that read)")
    return 1.0 - min(levenshtein.distance(found, wanted), len(wanted)) / len(wanted)


def _plain(text: str) -> str:
    return text.replace(" ", "").lower()
