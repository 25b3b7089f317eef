# SPDX-License-Identifier: Apache-2.0
"""HPSv2.1: how people would rate a picture for its prompt, by a CLIP-H trained on Human Preference Dataset v2.

Rule (https://github.com/tgxs002/HPSv2, hpsv2/img_score.py): cos(image, text) of ViT-H-14 with the weights of
HPS_v2.1_compressed.pt, an open_clip state dict; about 0.2 to 0.35 for pictures of diffusion models. The picture is
shrunk until its longer side fits the encoder and padded with black, not cropped: bicubic with antialiasing on fp32
pixels, as torchvision >= 0.17 does for the package. Prompts are mended by ftfy (quotes, ligatures, broken Unicode) and
freed of HTML escapes, as the package does. The package computes in fp16 (`dtype=fp16`); the default here is fp32.

The model runs as transformers' CLIPModel: tensors are renamed, and query, key and value taken apart, nothing else. So
neither open_clip nor torchvision is needed; the scores are theirs to 1e-5 (tests/reward/test_hpsv2.py).

Weights: HPS_v2.1_compressed.pt of xswu/HPSv2, 2.0 GB in fp16, Apache-2.0; `path=FOLDER/HPS_v2_compressed.pt` is v2.0.
Config and tokenizer: laion/CLIP-ViT-H-14-laion2B-s32B-b79K, MIT. Paper: https://arxiv.org/abs/2306.09341
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ftfy
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from verl_digen.require import require
from verl_digen.reward import encoders
from verl_digen.reward.base import checkpoint_file, checkpoint_folder

WEIGHTS_FILE = "HPS_v2.1_compressed.pt"
STATE = "state_dict"
"""Key of the tensors in that file."""
RENAMED = (
    (r"^positional_embedding$", "text_model.embeddings.position_embedding.weight"),
    (r"^token_embedding\.", "text_model.embeddings.token_embedding."),
    (r"^ln_final\.", "text_model.final_layer_norm."),
    (r"^transformer\.resblocks\.", "text_model.encoder.layers."),
    (r"^text_projection$", "text_projection.weight"),
    (r"^visual\.class_embedding$", "vision_model.embeddings.class_embedding"),
    (r"^visual\.positional_embedding$", "vision_model.embeddings.position_embedding.weight"),
    (r"^visual\.conv1\.", "vision_model.embeddings.patch_embedding."),
    (r"^visual\.ln_pre\.", "vision_model.pre_layrnorm."),  # transformers spells it so
    (r"^visual\.ln_post\.", "vision_model.post_layernorm."),
    (r"^visual\.transformer\.resblocks\.", "vision_model.encoder.layers."),
    (r"^visual\.proj$", "visual_projection.weight"),
    (r"\.ln_([12])\.", r".layer_norm\1."),
    (r"\.mlp\.c_fc\.", ".mlp.fc1."),
    (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    (r"\.attn\.out_proj\.", ".self_attn.out_proj."),
)
"""Names in open_clip -> in transformers, for `renamed`."""
TRANSPOSED = ("text_projection", "visual.proj")


@dataclass(frozen=True)
class HpsV2Config(encoders.EncoderConfig):
    path: str = "xswu/HPSv2"
    """The file of weights, or a folder or repository that holds HPS_v2.1_compressed.pt."""
    base: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
    """Folder or repository with the CLIP config and tokenizer in transformers' format; its weights are not fetched."""


class HpsV2(encoders.CosineReward):
    config_class = HpsV2Config

    def __init__(self, config: HpsV2Config, device: torch.device):
        super().__init__(config, device)
        from transformers import CLIPConfig, CLIPModel  # heavy, and the driver imports this file

        base = checkpoint_folder(config.base, "hpsv2: base", encoders.DESCRIPTIONS)
        weights = encoders.load_weights(checkpoint_file(config.path, WEIGHTS_FILE, "hpsv2: path"), "hpsv2: path")
        require(STATE in weights, f"hpsv2: path must hold {STATE}", config.path, "check that it is the right file")
        clip = CLIPConfig.from_pretrained(base)
        model = encoders.load_model(
            CLIPModel, None, "hpsv2: path", config=clip, state_dict=to_transformers(weights[STATE])
        )
        size: Any = clip.vision_config.image_size  # type: ignore[union-attr]
        self.encoder = encoders.ClipEncoder(
            model,
            encoders.load_tokenizer(base, "hpsv2: base"),
            lambda image: prepare(image, size),
            device,
            config.dtype,
            clean=lambda text: html.unescape(html.unescape(ftfy.fix_text(text))),
        )


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of open_clip's CLIP by their names in transformers' CLIPModel. A name that is in neither stays as it is,
    so that loading refuses it by that name.

    Example:
        to_transformers({"ln_final.bias": x})  # {"text_model.final_layer_norm.bias": x}
    """
    made: dict[str, Tensor] = {}
    for name, tensor in state.items():
        new = encoders.renamed(name, RENAMED)
        joint = re.fullmatch(r"(.*\.\d+)\.attn\.in_proj_(weight|bias)", new)
        if joint is not None:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                made[f"{joint[1]}.self_attn.{part}_proj.{joint[2]}"] = piece.contiguous()
        else:
            made[new] = tensor.T.contiguous() if name in TRANSPOSED else tensor
    return made


def prepare(image: Image.Image, size_px: int) -> Tensor:
    """The picture, its longer side made `size_px`, in the middle of a black square; [3, size, size] fp32."""
    pixels = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float()
    height, width = pixels.shape[1:]
    scale = size_px / max(height, width)
    if scale != 1:
        new = (max(1, round(height * scale)), max(1, round(width * scale)))
        pixels = F.interpolate(pixels[None], new, mode="bicubic", align_corners=False, antialias=True)[0]
    rows, columns = size_px - pixels.shape[1], size_px - pixels.shape[2]
    pixels = F.pad(pixels, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return encoders.clip_pixels(pixels.movedim(0, -1))


REWARD = HpsV2
