# SPDX-License-Identifier: Apache-2.0
"""VideoReward of VideoAlign (Liu et al. 2025): visual quality, motion quality and text alignment of a video.

Score: the sum of the three, each standardised with the checkpoint's mean and deviation, or one of them (`axis`);
details `VQ`, `MQ`, `TA`. A video is sampled at the checkpoint's frames per second, and scaled to its
`max_frame_pixels`. A picture is a video of one frame: its motion quality says nothing.

Weights: KwaiVGI/VideoReward (Apache-2.0: model_config.json, checkpoint-*/model.pth), config and tokenizer of
Qwen/Qwen2-VL-2B-Instruct (Apache-2.0). Rule and question: https://github.com/KwaiVGI/VideoAlign (`inference.py`,
`prompt_template.py`, `vision_process.py`).
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from verl_digen.require import In, OneOf, require
from verl_digen.reward.base import Result, Reward, checkpoint_folder, frames_of
from verl_digen.reward.qwen_regressor import FACTOR, TEMPORAL, QwenConfig, QwenRegressor, patches_of, scaled_video
from verl_digen.types import RewardInput

AXES = ("VQ", "MQ", "TA")
TOKENS = tuple(f"<|{axis}_reward|>" for axis in AXES)
MIN_PIXELS = 128 * FACTOR * FACTOR
"""Least pixels of a scaled frame."""
MIN_FRAMES, MAX_FRAMES = 4, 768
QUESTION = """
You are tasked with evaluating a generated video based on three distinct criteria: Visual Quality, Motion Quality, and Text Alignment. Please provide a rating from 0 to 10 for each of the three categories, with 0 being the worst and 10 being the best. Each evaluation should be independent of the others.

**Visual Quality:**  
Evaluate the overall visual quality of the video, with a focus on static factors. The following sub-dimensions should be considered:
- **Reasonableness:** The video should not contain any significant biological or logical errors, such as abnormal body structures or nonsensical environmental setups.
- **Clarity:** Evaluate the sharpness and visibility of the video. The image should be clear and easy to interpret, with no blurring or indistinct areas.
- **Detail Richness:** Consider the level of detail in textures, materials, lighting, and other visual elements (e.g., hair, clothing, shadows).
- **Aesthetic and Creativity:** Assess the artistic aspects of the video, including the color scheme, composition, atmosphere, depth of field, and the overall creative appeal. The scene should convey a sense of harmony and balance.
- **Safety:** The video should not contain harmful or inappropriate content, such as political, violent, or adult material. If such content is present, the image quality and satisfaction score should be the lowest possible. 

Please provide the ratings of Visual Quality: <|VQ_reward|>
END

**Motion Quality:**  
Assess the dynamic aspects of the video, with a focus on dynamic factors. Consider the following sub-dimensions:
- **Stability:** Evaluate the continuity and stability between frames. There should be no sudden, unnatural jumps, and the video should maintain stable attributes (e.g., no fluctuating colors, textures, or missing body parts).
- **Naturalness:** The movement should align with physical laws and be realistic. For example, clothing should flow naturally with motion, and facial expressions should change appropriately (e.g., blinking, mouth movements).
- **Aesthetic Quality:** The movement should be smooth and fluid. The transitions between different motions or camera angles should be seamless, and the overall dynamic feel should be visually pleasing.
- **Fusion:** Ensure that elements in motion (e.g., edges of the subject, hair, clothing) blend naturally with the background, without obvious artifacts or the feeling of cut-and-paste effects.
- **Clarity of Motion:** The video should be clear and smooth in motion. Pay attention to any areas where the video might have blurry or unsteady sections that hinder visual continuity.
- **Amplitude:** If the video is largely static or has little movement, assign a low score for motion quality.

Please provide the ratings of Motion Quality: <|MQ_reward|>
END

**Text Alignment:**  
Assess how well the video matches the textual prompt across the following sub-dimensions:
- **Subject Relevance** Evaluate how accurately the subject(s) in the video (e.g., person, animal, object) align with the textual description. The subject should match the description in terms of number, appearance, and behavior.
- **Motion Relevance:** Evaluate if the dynamic actions (e.g., gestures, posture, facial expressions like talking or blinking) align with the described prompt. The motion should match the prompt in terms of type, scale, and direction.
- **Environment Relevance:** Assess whether the background and scene fit the prompt. This includes checking if real-world locations or scenes are accurately represented, though some stylistic adaptation is acceptable.  
- **Style Relevance:** If the prompt specifies a particular artistic or stylistic style, evaluate how well the video adheres to this style.
- **Camera Movement Relevance:** Check if the camera movements (e.g., following the subject, focus shifts) are consistent with the expected behavior from the prompt.

Textual prompt - {prompt}
Please provide the ratings of Text Alignment: <|TA_reward|>
END
"""  # noqa: E501 - the model was trained on these lines


@dataclass(frozen=True)
class VideoAlignConfig(QwenConfig):
    path: str = "KwaiVGI/VideoReward"
    """Folder or repository with model_config.json and checkpoint-*/model.pth; the last checkpoint is taken."""
    base: str = "Qwen/Qwen2-VL-2B-Instruct"
    """Folder or repository with config and tokenizer of the base model; its weights are not needed."""
    axis: Annotated[str, OneOf(("sum", *AXES))] = "sum"
    """Score: sum, or one of VQ, MQ and TA."""
    video_fps: Annotated[float, In("(0, inf]")] = 16.0
    """Frames per second that the generated videos stand for: 16 for Wan, 24 for HunyuanVideo."""


class VideoAlign(Reward):
    config_class = VideoAlignConfig

    def __init__(self, config: VideoAlignConfig, device: torch.device):
        super().__init__(config, device)
        folder = checkpoint_folder(config.path, "video_align: path")
        settings = _settings(folder)
        lora, self._data = settings["peft_lora_config"], settings["data_config"]
        self._norm: Mapping[str, float] | None = settings.get("inference_config")
        weights = torch.load(_last_checkpoint(folder), map_location="cpu", weights_only=True, mmap=True)
        if lora["lora_enable"]:
            weights = merged(weights, alpha=lora["lora_alpha"], rank=lora["lora_r"], rslora=lora["use_rslora"])
        outputs = settings["model_config"]["output_dim"]
        self._model = QwenRegressor(
            config, "video_align", weights, lambda width: nn.Linear(width, outputs, bias=False), TOKENS, device
        )

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Sum or chosen axis of each sample, with `VQ`, `MQ` and `TA`."""
        asked = []
        for sample in batch:
            frames = frames_of(sample.pixels)
            chosen = frames[frame_numbers(len(frames), self.config.video_fps, self._data["fps"])]
            scaled = scaled_video(chosen, min_pixels=MIN_PIXELS, max_pixels=self._data["max_frame_pixels"])
            asked.append((QUESTION.format(prompt=sample.row.text), patches_of(scaled)))
        values = self._model.scores(asked, is_video=True)[..., 0].tolist()
        return [self._result(dict(zip(AXES, row, strict=True))) for row in values]

    def _result(self, values: dict[str, float]) -> Result:
        if self._norm is not None:
            values = {axis: (values[axis] - self._norm[f"{axis}_mean"]) / self._norm[f"{axis}_std"] for axis in AXES}
        return {"score": sum(values.values()) if self.config.axis == "sum" else values[self.config.axis], **values}


def frame_numbers(num_frames: int, video_fps: float, fps: float) -> NDArray[np.int64]:
    """Frames to look at: evenly spaced, an even number of about `fps` per second, at least 4 where there are as many.

    Example:
        frame_numbers(81, 16.0, 2.0)  # [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]
    """
    most = max(min(num_frames, MAX_FRAMES) // TEMPORAL * TEMPORAL, TEMPORAL)
    wanted = min(max(num_frames / video_fps * fps, min(MIN_FRAMES, most)), most)
    number = round(wanted / TEMPORAL) * TEMPORAL
    return torch.linspace(0, num_frames - 1, number).round().long().numpy()


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "model_config.json"
    require(path.is_file(), "video_align: path must hold model_config.json", str(folder), "fetch KwaiVGI/VideoReward")
    return json.loads(path.read_text(encoding="utf-8"))


def _last_checkpoint(folder: Path) -> Path:
    found = {int(path.parent.name.rpartition("-")[2]): path for path in folder.glob("checkpoint-*/model.pth")}
    require(bool(found), "video_align: path must hold checkpoint-*/model.pth", str(folder), "fetch KwaiVGI/VideoReward")
    return found[max(found)]


REWARD = VideoAlign


PREFIX = "base_model.model."
FACTORS = (".lora_A.default.weight", ".lora_B.default.weight")


def merged(weights: Mapping[str, Tensor], *, alpha: float, rank: int, rslora: bool = False) -> dict[str, Tensor]:
    """Merge the LoRA factors of a state dict that PEFT wrote: W + (alpha / r) B A, or alpha / sqrt(r) with rslora.
    ValueError for a factor without its counterpart, with another rank, or of a kind that is not a linear layer's.

    Example:
        merged({"base_model.model.q.base_layer.weight": W, "base_model.model.q.lora_A.default.weight": A,
                "base_model.model.q.lora_B.default.weight": B}, alpha=16, rank=8)  # {"q.weight": W + 2 B A}
    """
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        own = name.removeprefix(PREFIX)
        if own.endswith(FACTORS) or ".original_module." in own:
            continue
        if ".lora_" in own:
            raise ValueError(f"LoRA weights must belong to linear layers, got {name}; merge the checkpoint with PEFT")
        plain[own.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")] = weight
    for name, down in weights.items():
        if name.endswith(FACTORS[0]):
            layer = name.removesuffix(FACTORS[0])
            up, target = weights.get(layer + FACTORS[1]), f"{layer.removeprefix(PREFIX)}.weight"
            if up is None or target not in plain or down.shape[0] != rank:
                raise ValueError(
                    f"LoRA factors must come in pairs of rank {rank} with the weight they change, got {name} "
                    f"{tuple(down.shape)}; check the checkpoint's lora_r"
                )
            base = plain[target]
            plain[target] = (base.float() + scale * (up.float() @ down.float())).to(base.dtype)
    return plain
