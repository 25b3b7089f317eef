# SPDX-License-Identifier: Apache-2.0
"""Image similarity: how much an edited picture is still like the images of its prompt (`PromptRow.images`).

Rule: the cosine of the image features of sample and source, the mean over the prompt's images, mostly 0.5 to 1. An
unchanged picture scores 1, so never train on this alone. CLIP's projected features (the default, as in flow_grpo's edit
runs, image_similarity of flow_grpo/clip_scorer.py) say that the same things are shown; DINOv2's normed class token says
that individual, pose and layout are the same, and is blind to words that CLIP knows.

Features hardly see a background that has been drawn anew. `pixel_weight` = w mixes in the pixels: (1 - w) cosine + w (1
- d), where d is the root mean square difference of the pixels in [0, 1], both pictures squeezed to `pixel_size_px`
squared. It also punishes the edit that was asked for, so a small w, 0.1 to 0.3, is meant. Details: `features`,
`pixels`. With w = 1 no checkpoint is loaded, and there is no `features`: a rule for tests and toys.

Weights: openai/clip-vit-large-patch14, MIT; facebook/dinov2-base, Apache-2.0.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image

from verl_digen.inputs.images import source_image
from verl_digen.require import In, refusing, require
from verl_digen.reward import encoders
from verl_digen.reward.base import Result, Reward, checkpoint_folder, images_of
from verl_digen.types import PromptRow, RewardInput

DINO_CLASSES = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}
"""Type of a checkpoint's config -> class of transformers whose `pooler_output` is the normed class token."""


@dataclass(frozen=True)
class ImageSimilarityConfig(encoders.EncoderConfig):
    path: str = "openai/clip-vit-large-patch14"
    """A CLIP or DINOv2 checkpoint in transformers' format: a folder, or "owner/repository" of the hub."""
    pixel_weight: Annotated[float, In("[0, 1]"), "0 is off"] = 0.0
    """Share of the pixels in the score, in [0, 1]."""
    pixel_size_px: Annotated[int, In("[1, inf]")] = 64
    """Width and height at which pixels are compared."""


class ImageSimilarity(Reward):
    config_class = ImageSimilarityConfig

    @classmethod
    def check_row(cls, arguments: Mapping[str, Any], row: PromptRow) -> None:
        remedy = "give its row the column images, or take the reward out"
        require(bool(row.images), "image_similarity needs prompts with images", row.text, remedy)

    def __init__(self, config: ImageSimilarityConfig, device: torch.device):
        super().__init__(config, device)
        self.encoder = None if config.pixel_weight == 1 else _load_encoder(config, device)

    @torch.no_grad()
    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Similarity of each sample to its prompt's images; [B]. ValueError without one, or if one is unreadable."""
        for sample in batch:
            self.check_row({}, sample.row)
        sources = {path: source_image(path).read() for sample in batch for path in sample.row.images}
        frames = [images_of(sample, self.config.num_frames) for sample in batch]
        cosines = self._cosines(batch, sources, frames)
        results: list[Result] = []
        for sample, own, cosine in zip(batch, frames, cosines, strict=True):
            pixels = self._pixel_similarity(own, [sources[path] for path in sample.row.images])
            weight = self.config.pixel_weight
            if cosine is None:
                results.append({"score": pixels, "pixels": pixels})
            else:
                score = (1 - weight) * cosine + weight * pixels
                results.append({"score": score, "features": cosine, "pixels": pixels})
        return results

    def _cosines(
        self, batch: Sequence[RewardInput], sources: Mapping[str, Image.Image], frames: Sequence[Sequence[Image.Image]]
    ) -> list[float] | list[None]:
        """Cosine of the features of each sample's frames and its prompt's images; None where features do not count."""
        if self.encoder is None:
            return [None] * len(batch)
        features = self.encoder.images([*sources.values(), *(image for own in frames for image in own)]).cpu()
        known = dict(zip(sources, features, strict=False))
        own_features = features[len(sources) :].split([len(own) for own in frames])
        return [
            (found @ torch.stack([known[path] for path in sample.row.images]).T).mean().item()
            for sample, found in zip(batch, own_features, strict=True)
        ]

    def _pixel_similarity(self, frames: Sequence[Image.Image], sources: Sequence[Image.Image]) -> float:
        """1 - root mean square difference, the mean over frames and sources; in [0, 1]."""
        own, others = (np.stack([self._small(image) for image in images]) for images in (frames, sources))
        return 1 - float(np.sqrt(np.square(own[:, None] - others).mean(axis=(2, 3, 4))).mean())

    def _small(self, image: Image.Image) -> np.ndarray:
        size = (self.config.pixel_size_px, self.config.pixel_size_px)
        return np.asarray(image.resize(size, Image.Resampling.BOX)) / 255.0


def _load_encoder(config: ImageSimilarityConfig, device: torch.device) -> encoders.PictureEncoder:
    import transformers

    key = "image_similarity: path"
    place = checkpoint_folder(config.path, key, encoders.FILES)
    with refusing(f"{key} must hold the config.json of a model", config.path, encoders.RIGHT):
        kind = transformers.AutoConfig.from_pretrained(place).model_type
    if kind == "clip":
        return encoders.ClipEncoder.load(str(place), key, device, config.dtype, has_text=False)
    known = ", ".join(("clip", *DINO_CLASSES))
    require(kind in DINO_CLASSES, f"{key} must be a checkpoint of type {known}", kind, "choose one of these")
    model = encoders.load_model(getattr(transformers, DINO_CLASSES[kind]), place, key)
    return encoders.PictureEncoder(
        model, encoders.load_processor(place, key, "BitImageProcessorPil"), device, config.dtype
    )


REWARD = ImageSimilarity
