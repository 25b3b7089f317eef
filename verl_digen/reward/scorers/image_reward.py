# SPDX-License-Identifier: Apache-2.0
"""ImageReward: how people would rate a picture for its prompt, by BLIP with a head, trained on 137k comparisons.

Rule (https://github.com/THUDM/ImageReward, ImageReward/ImageReward.py): BLIP-large's text encoder reads the prompt, cut
at 35 tokens, with cross attention to the picture; five linear layers on its first token give x; the score is (x -
0.16717) / 1.03334, mean and standard deviation on the training set; about -2 to 2 for pictures of diffusion models.

The model runs as transformers' BlipVisionModel and BlipTextModel with the published tensors renamed: the package pins
timm 0.6.13 and fairscale and imports names that transformers 5 has not, so it cannot stand beside this plugin. The
scores are the package's to 1e-5 (tests/reward/test_image_reward.py).

Weights: ImageReward.pt and med_config.json of THUDM/ImageReward, 1.8 GB, Apache-2.0; tokenizer:
google-bert/bert-base-uncased, Apache-2.0. Paper: https://arxiv.org/abs/2304.05977
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from verl_digen.require import require
from verl_digen.reward import encoders
from verl_digen.reward.base import checkpoint_file, checkpoint_folder

WEIGHTS_FILE, CONFIG_FILE = "ImageReward.pt", "med_config.json"
MAX_TOKENS = 35
SCORE_MEAN, SCORE_STD = 0.16717362830052426, 1.0333394966054072
HEAD_DIM = 64
"""Channels of an attention head of BLIP's picture encoders, base and large."""
VISION_EPS = 1e-6
"""Epsilon of the picture encoder's layer norms; BlipVisionConfig's default is 1e-5."""
CONFIG_KEYS = (
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "layer_norm_eps",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "pad_token_id",
    "vocab_size",
)
"""Keys of med_config.json that the text encoder is made from."""
UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\.(weight|bias)|blip\.text_encoder\.embeddings\.position_ids")
"""Tensors of the published file that the score does not need."""
VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^norm\.", "post_layernorm."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"\.attn\.qkv\.", ".self_attn.qkv."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
)
"""Names in timm -> in transformers, for `renamed`."""


@dataclass(frozen=True)
class ImageRewardConfig(encoders.EncoderConfig):
    path: str = "THUDM/ImageReward"
    """Folder or repository that holds ImageReward.pt and med_config.json."""
    tokenizer: str = "google-bert/bert-base-uncased"
    """Folder or repository of the tokenizer."""


class ImageReward(encoders.FrameReward):
    config_class = ImageRewardConfig

    def __init__(self, config: ImageRewardConfig, device: torch.device):
        super().__init__(config, device)
        from transformers import BlipTextModel, BlipVisionModel  # heavy, and the driver imports this file

        key = "image_reward: path"
        weights = checkpoint_file(config.path, WEIGHTS_FILE, key)
        vision, text, head = parts(encoders.load_weights(weights, key))
        vision_config = _vision_config(vision, key)
        text_config = _text_config(checkpoint_file(config.path, CONFIG_FILE, key), vision_config.hidden_size, key)
        self.size_px: Any = vision_config.image_size
        dtype = encoders.DTYPES[config.dtype]
        self.vision = encoders.load_model(BlipVisionModel, None, key, config=vision_config, state_dict=vision)
        self.text = encoders.load_model(
            BlipTextModel, None, key, config=text_config, state_dict=text, add_pooling_layer=False
        )
        for model in (self.vision, self.text):
            model.to(device, dtype).eval().requires_grad_(False)
        self.head = encoders.load_head(head, text_config.hidden_size, key, str(weights)).to(device)
        self.tokenizer = encoders.load_tokenizer(
            checkpoint_folder(config.tokenizer, "image_reward: tokenizer", encoders.DESCRIPTIONS),
            "image_reward: tokenizer",
        )

    def frame_scores(self, images: Sequence[Image.Image], owners: Sequence[int], texts: Sequence[str]) -> Tensor:
        """Standardised number of the head; [N]."""
        own_texts = [texts[owner] for owner in owners]
        tokens = self.tokenizer(
            own_texts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        ).to(self.device)
        pixels = torch.stack([prepare(image, self.size_px) for image in images])
        seen = self.vision(pixel_values=pixels.to(self.device, self.vision.dtype)).last_hidden_state
        read = self.text(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            encoder_hidden_states=seen,
            encoder_attention_mask=torch.ones(seen.shape[:2], dtype=torch.long, device=self.device),
        ).last_hidden_state
        return (self.head(read[:, 0].float()) - SCORE_MEAN) / SCORE_STD


def parts(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(picture encoder, text encoder, head) of the published tensors, named as transformers and `load_head` expect. A
    name of none of them goes to the head as it is, which refuses it by that name."""
    vision: dict[str, Tensor] = {}
    text: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if UNUSED.fullmatch(name):
            continue
        if name.startswith("blip.visual_encoder."):
            vision[encoders.renamed(name.removeprefix("blip.visual_encoder."), VISION_NAMES)] = tensor
        elif name.startswith("blip.text_encoder."):
            text[name.removeprefix("blip.text_encoder.")] = tensor
        else:
            head[name.removeprefix("mlp.")] = tensor
    return vision, text, head


def prepare(image: Image.Image, size_px: int) -> Tensor:
    """The middle of the picture, its shorter side made `size_px`; [3, size, size] fp32."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    other = int(size_px * long / short)
    sizes = (size_px, other) if width <= height else (other, size_px)
    image = image.convert("RGB").resize(sizes, Image.Resampling.BICUBIC)
    left, top = (round((side - size_px) / 2) for side in sizes)
    return encoders.clip_pixels(np.array(image.crop((left, top, left + size_px, top + size_px))))


def _vision_config(state: Mapping[str, Tensor], key: str) -> Any:
    """Sizes of the picture encoder, read off its tensors."""
    from transformers import BlipVisionConfig

    patches, positions, hidden = (
        "embeddings.patch_embedding.weight",
        "embeddings.position_embedding",
        "encoder.layers.0.mlp.fc1.weight",
    )
    lacking = [name for name in (patches, positions, hidden) if name not in state]
    require(not lacking, f"{key} must hold BLIP's picture encoder", lacking, "check that it is the right file")
    width, patch_px = state[patches].shape[0], state[patches].shape[-1]
    return BlipVisionConfig(
        hidden_size=width,
        intermediate_size=state[hidden].shape[0],
        num_hidden_layers=len({name.split(".")[2] for name in state if name.startswith("encoder.layers.")}),
        num_attention_heads=width // HEAD_DIM,
        image_size=round((state[positions].shape[1] - 1) ** 0.5) * patch_px,
        patch_size=patch_px,
        layer_norm_eps=VISION_EPS,
    )


def _text_config(path: Path, vision_width: int, key: str) -> Any:
    """The text encoder's config from med_config.json; the package, too, replaces its `encoder_width`."""
    from transformers import BlipTextConfig

    given = json.loads(path.read_text())
    lacking = [name for name in CONFIG_KEYS if name not in given]
    require(not lacking, f"{key}: {CONFIG_FILE} must have all keys", lacking, "fetch it again")
    return BlipTextConfig(**{name: given[name] for name in CONFIG_KEYS}, encoder_hidden_size=vision_width)


REWARD = ImageReward
