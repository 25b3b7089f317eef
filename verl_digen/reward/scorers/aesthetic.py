# SPDX-License-Identifier: Apache-2.0
"""Aesthetic: how people would rate the looks of a picture, whatever its prompt.

Rule (https://github.com/christophschuhmann/improved-aesthetic-predictor, sac+logos+ava1-l14-linearMSE): five linear
layers without activations on the image feature of CLIP ViT-L/14, divided by its length; the score is their number /
`divisor`. DDPO and flow_grpo train on the number itself: `divisor=1`. It is about 1 to 10, mostly 4 to 7.

Weights: openai/clip-vit-large-patch14 (MIT), of which the text encoder is dropped; head: aesthetic-model.pth of
trl-lib/ddpo-aesthetic-predictor, 3.7 MB, which is sac+logos+ava1-l14-linearMSE.pth renamed; the predictor's repository
is Apache-2.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from PIL import Image
from torch import Tensor

from verl_digen.require import In
from verl_digen.reward.base import checkpoint_file
from verl_digen.reward.encoders import ClipEncoder, EncoderConfig, FrameReward, load_head, load_weights

HEAD_FILE = "aesthetic-model.pth"


@dataclass(frozen=True)
class AestheticConfig(EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"
    """CLIP in transformers' format: a folder, or "owner/repository" of the hub."""
    head: str = "trl-lib/ddpo-aesthetic-predictor"
    """The predictor: its file, or a folder or repository that holds aesthetic-model.pth."""
    divisor: Annotated[float, In("(0, inf]")] = 10.0
    """The number is divided by this."""


class Aesthetic(FrameReward):
    config_class = AestheticConfig

    def __init__(self, config: AestheticConfig, device: torch.device):
        super().__init__(config, device)
        self.encoder = ClipEncoder.load(config.path, "aesthetic: path", device, config.dtype, has_text=False)
        path = checkpoint_file(config.head, HEAD_FILE, "aesthetic: head")
        state = load_weights(path, "aesthetic: head")
        self.head = load_head(state, self.encoder.width, "aesthetic: head", str(path)).to(device)

    def frame_scores(self, images: Sequence[Image.Image], owners: Sequence[int], texts: Sequence[str]) -> Tensor:
        """Number of the head over `divisor`; [N]."""
        return self.head(self.encoder.images(images)) / self.config.divisor


REWARD = Aesthetic
