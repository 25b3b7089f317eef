# SPDX-License-Identifier: Apache-2.0
"""PickScore: how people would rate a picture for its prompt, by a CLIP-H trained on the choices of Pick-a-Pic.

Rule (model card of yuvalkirstain/PickScore_v1): s = exp(logit_scale) cos(image, text), about 15 to 25 for pictures of
diffusion models; the score is s / `divisor`. flow_grpo divides by 26 (flow_grpo/pickscore_scorer.py), which is the
default here; `divisor=1` is the model card's number.

Weights: yuvalkirstain/PickScore_v1, 3.9 GB in fp32; its repository holds the tokenizer and picture processor of
laion/CLIP-ViT-H-14-laion2B-s32B-b79K, which the model card names. The model card states no licence. Paper:
https://arxiv.org/abs/2305.01569
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from verl_digen.require import In
from verl_digen.reward.encoders import ClipEncoder, CosineReward, EncoderConfig


@dataclass(frozen=True)
class PickScoreConfig(EncoderConfig):
    path: str = "yuvalkirstain/PickScore_v1"
    """Weights in transformers' format: a folder, or "owner/repository" of the hub."""
    processor: str | None = None
    """Folder or repository with tokenizer and picture processor; None takes them from `path`."""
    divisor: Annotated[float, In("(0, inf]")] = 26.0
    """The scaled cosine is divided by this."""


class PickScore(CosineReward):
    config_class = PickScoreConfig

    def __init__(self, config: PickScoreConfig, device: torch.device):
        super().__init__(config, device)
        self.encoder = ClipEncoder.load(
            config.path, "pickscore: path", device, config.dtype, processor=config.processor
        )
        self.factor, self.divisor = self.encoder.logit_scale, config.divisor


REWARD = PickScore
