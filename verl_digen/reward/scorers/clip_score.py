# SPDX-License-Identifier: Apache-2.0
"""CLIP score: how well a picture agrees with its prompt, c = cos(image, text) of CLIP's projected features.

`scale=raw` is c itself, as in most papers and DiffusionNFT (logits / 100). `scale=flow_grpo` is exp(logit_scale) c / 30
(flow_grpo/clip_scorer.py), 100 c / 30 for OpenAI's weights. Pictures are prepared by the checkpoint's processor;
flow_grpo resizes float tensors with torchvision, so its numbers differ a little. c is about 0.15 to 0.35 for OpenAI's
weights, so about 0.5 to 1.15 with `flow_grpo`.

Weights: openai/clip-vit-large-patch14, 1.7 GB in fp32; MIT (https://github.com/openai/CLIP).
"""

from dataclasses import dataclass
from typing import Annotated

import torch

from verl_digen.require import OneOf
from verl_digen.reward.encoders import ClipEncoder, CosineReward, EncoderConfig

SCALES = ("raw", "flow_grpo")
FLOW_GRPO_DIVISOR = 30.0


@dataclass(frozen=True)
class ClipScoreConfig(EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"
    """Weights in transformers' format: a folder, or "owner/repository" of the hub."""
    scale: Annotated[str, OneOf(SCALES)] = "raw"
    """raw: the cosine. flow_grpo: exp(logit_scale) times the cosine, over 30."""


class ClipScore(CosineReward):
    config_class = ClipScoreConfig

    def __init__(self, config: ClipScoreConfig, device: torch.device):
        super().__init__(config, device)
        self.encoder = ClipEncoder.load(config.path, "clip_score: path", device, config.dtype)
        if config.scale == "flow_grpo":
            self.factor, self.divisor = self.encoder.logit_scale, FLOW_GRPO_DIVISOR


REWARD = ClipScore
