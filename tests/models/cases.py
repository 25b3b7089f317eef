# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of all architectures, and the equivalent calls of their diffusers pipelines."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from PIL import Image
from torch import Tensor, nn

from tests.texts import TextEncoder
from verl_digen.inputs import PromptInputs, SourceImage, fitted_size, source_image
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel, PromptEncoder
from verl_digen.types import Geometry

CPU = torch.device("cpu")
PROMPTS = ("a red circle", "two small blue squares left of a red circle on a green background")
NEGATIVE = " "
NUM_STEPS = 4


def true_cfg(scale: float) -> dict[str, Any]:
    """Arguments of pipelines whose `guidance_scale` is the embedded one."""
    return {"true_cfg_scale": scale, "negative_prompt": [NEGATIVE] * len(PROMPTS) if scale > 1 else None}


def plain_cfg(scale: float) -> dict[str, Any]:
    return {"guidance_scale": scale, "negative_prompt": [NEGATIVE] * len(PROMPTS)}


def guided_by_guider(scale: float) -> dict[str, Any]:
    """Arguments of pipelines whose guider holds the scale, see `Loaded.run_pipeline`."""
    return {"negative_prompt": [NEGATIVE] * len(PROMPTS)}


def cfg_from_zero(scale: float) -> dict[str, Any]:
    """Arguments of Z-Image's pipeline, where 0 is no guidance."""
    return plain_cfg(scale - 1)


PICTURES = (Geometry(64, 64), Geometry(48, 80))
SOURCE_PX, IMAGE_PX = (60, 40), 64
"""Width and height of the image of an edit model's prompts, and the side of the square at which it is read."""
EDITS = tuple(replace(size, sources=(fitted_size(*SOURCE_PX, IMAGE_PX),)) for size in PICTURES)
VIDEOS = (Geometry(64, 64, 5), Geometry(48, 80, 9))


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint."""

    name: str
    """Key in `verl_digen.models.tiny.BUILDERS`."""
    guidance: Callable[[float], dict[str, Any]]
    """Our scale -> the pipeline's arguments."""
    sizes: tuple[Geometry, Geometry] = PICTURES
    px_multiple: int = 16
    max_tokens: int = 256
    """Longest prompt in tokens, as our length check counts them."""
    word_limit: int = 0
    """Maximum repetitions of the word "red": `max_tokens` less the tokens around a prompt."""
    pipeline_args: dict[str, Any] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        return self.sizes[0].num_frames > 1

    @property
    def is_edit(self) -> bool:
        return len(self.sizes[0].sources) > 0


CASES = (
    Case("flux_dev", true_cfg, max_tokens=512, word_limit=511),
    Case("flux_schnell", true_cfg, word_limit=255, pipeline_args={"max_sequence_length": 256}),
    # 21 frames are 6 latent frames, more than the VAE decodes in one temporal tile
    Case("hunyuan_video", true_cfg, (Geometry(64, 64, 5), Geometry(32, 48, 21)), max_tokens=351, word_limit=254),
    Case("hunyuan_video15", guided_by_guider, VIDEOS, max_tokens=1108, word_limit=994),
    Case("qwen_image", true_cfg, max_tokens=1058, word_limit=1018),
    Case("qwen_image_edit_plus", true_cfg, EDITS, max_tokens=1088, word_limit=1018),
    Case("sd3", plain_cfg, word_limit=255),
    Case("wan2.1", plain_cfg, VIDEOS, max_tokens=512, word_limit=511),
    Case("wan2.2_a14b", plain_cfg, VIDEOS, max_tokens=512, word_limit=511),
    Case("wan2.2_ti2v_5b", plain_cfg, (Geometry(64, 64, 5), Geometry(32, 96, 9)), 32, max_tokens=512, word_limit=511),
    Case("z_image", cfg_from_zero, max_tokens=512, word_limit=503),
)


class Loaded:
    """Checkpoint of a case; each part is loaded at its first use."""

    def __init__(self, case: Case, path: Path):
        self.case = case
        self.path = path
        self.model: DiffusionModel = load_model(path)
        self.images: tuple[SourceImage, ...] = ()
        """Images of every prompt."""
        if case.is_edit:
            self.images = (draw_image(path.parent / "source.png", SOURCE_PX),)

    @cached_property
    def transformer(self) -> nn.Module:
        return self.model.load_transformer(torch.float32).requires_grad_(False)

    @cached_property
    def encode(self) -> TextEncoder:
        return self.of_texts(self.model.load_encoder(torch.float32, CPU))

    def of_texts(self, encode: PromptEncoder) -> TextEncoder:
        """Turn an encoder into a function of texts, each of them about `images`."""
        return lambda texts: encode([PromptInputs(text, self.images, IMAGE_PX) for text in texts])

    @cached_property
    def pipeline(self) -> Any:
        return self.load_pipeline(torch.float32)

    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """Load diffusers' pipeline, with the checkpoint's own scheduler."""
        loaded: Any = DiffusionPipeline.from_pretrained(self.path, dtype=dtype, **self.model.pipeline_parts())
        loaded.set_progress_bar_config(disable=True)
        if isinstance(loaded.vae, AutoencoderKLHunyuanVideo15):
            loaded.vae.enable_slicing()  # its attention takes one video at a time
        return loaded

    def run_pipeline(
        self, geometry: Geometry, scale: float, latents: Tensor, *, pipeline: Any = None, **more: Any
    ) -> Tensor:
        """Output of the pipeline for PROMPTS and these initial latents."""
        pipeline = pipeline or self.pipeline
        if self.case.guidance is guided_by_guider:
            pipeline.guider = pipeline.guider.new(guidance_scale=scale)
        size = {"height": geometry.height_px, "width": geometry.width_px}
        if self.case.is_video:
            size["num_frames"] = geometry.num_frames
        arguments = {"num_inference_steps": NUM_STEPS, "output_type": "latent"} | self.case.pipeline_args
        arguments |= self.case.guidance(scale) | more
        if self.case.is_edit:
            return self._run_edits(pipeline, latents, **size, **arguments)
        made = pipeline(list(PROMPTS), latents=latents, **size, **arguments)
        return torch.as_tensor(made[0])

    def _run_edits(self, pipeline: Any, latents: Tensor, negative_prompt: Any, **arguments: Any) -> Tensor:
        """Run a pipeline that takes one prompt at a time, with images at `IMAGE_PX`."""
        arguments["negative_prompt"] = negative_prompt and negative_prompt[0]
        images = [image.read() for image in self.images]
        with patch.object(sys.modules[type(pipeline).__module__], "VAE_IMAGE_SIZE", IMAGE_PX**2):
            made = [
                pipeline(images, prompt, latents=start[None], **arguments)[0]
                for prompt, start in zip(PROMPTS, latents, strict=True)
            ]
        return torch.cat([torch.as_tensor(one) for one in made])


def draw_image(path: Path, size_px: tuple[int, int], seed: int = 0) -> SourceImage:
    """Write a picture of smooth random colours, (width, height) px."""
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    Image.fromarray(colours).resize(size_px, Image.Resampling.BICUBIC).save(path)
    return source_image(str(path))


def record_inputs(network: nn.Module) -> tuple[list[dict[str, Any]], Callable[[], None]]:
    """Record the arguments of every forward of `network`, by name, until the returned function is called."""
    calls: list[dict[str, Any]] = []
    signature = inspect.signature(network.forward)

    def note(module: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))

    return calls, network.register_forward_pre_hook(note, with_kwargs=True).remove
