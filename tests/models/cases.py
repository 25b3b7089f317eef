# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoints of all architectures, and the equivalent calls of their diffusers pipelines."""

import inspect
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from PIL import Image
from torch import Tensor, nn

from tests.texts import TextEncoder
from tests.tiny_models import build_tiny
from verl_digen.config import SamplingConfig
from verl_digen.inputs.images import SourceImage, source_image
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel, PromptEncoder
from verl_digen.sampling.requests import geometry_of, inputs_of
from verl_digen.tools.checkup.selftest import final_latents, images_read_at, load_pipeline, pictures_of, size_of
from verl_digen.types import Condition, Geometry

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


def cfg_with_embeds(scale: float) -> dict[str, Any]:
    """Arguments of FLUX.2's pipeline, whose negative prompt is empty unless it is given encoded."""
    return {"guidance_scale": scale, "negative_prompt_embeds": None}


def cfg_from_zero(scale: float) -> dict[str, Any]:
    """Arguments of Z-Image's pipeline, where 0 is no guidance."""
    return plain_cfg(scale - 1)


def one_scale_for_both_parts(scale: float) -> dict[str, Any]:
    """Arguments of LTX-2's pipeline, with its other guidance off."""
    from verl_digen.models.ltx2 import PLAIN_GUIDANCE  # needs transformers 5.10

    return plain_cfg(scale) | PLAIN_GUIDANCE | {"guidance_scale": scale, "audio_guidance_scale": scale}


PICTURES = (Geometry(64, 64), Geometry(48, 80))
SOURCE_PX, IMAGE_PX = (60, 40), 64
"""Width and height of the image of an edit model's prompts, and the side of the square at which it is read."""
VIDEOS = (Geometry(64, 64, 5), Geometry(48, 80, 9))


def with_image(size: Geometry, rule: str, source_px: tuple[int, int] = SOURCE_PX, **more: Any) -> Geometry:
    """A size for prompts with an image of this (width, height), by the rule of this name."""
    sizes = {"height_px": size.height_px, "width_px": size.width_px, "num_frames": size.num_frames}
    return geometry_of(SamplingConfig(**sizes, image_sizes=rule, image_px=IMAGE_PX, **more), [source_px])


def edits(
    rule: str, source_px: tuple[int, int] = SOURCE_PX, pictures: Sequence[Geometry] = PICTURES
) -> tuple[Geometry, Geometry]:
    """Pictures about an image."""
    one, other = (with_image(size, rule, source_px) for size in pictures)
    return one, other


def listed(num_frames: int) -> Geometry:
    """Size of a video that HunyuanVideo 1.5's pipeline makes of the image."""
    return with_image(Geometry(64, 64, num_frames), "hunyuan_video15", size_from_image=True)


LISTED = (listed(5), listed(9))
CONTINUED = (with_image(VIDEOS[0], "wan"), with_image(VIDEOS[1], "wan"))
FIRST_FRAMES = (with_image(Geometry(64, 64, 5), "wan_ti2v"), with_image(Geometry(32, 96, 9), "wan_ti2v"))


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
    source_px: tuple[int, int] = SOURCE_PX
    """Width and height of the image of an edit model's prompts."""
    frame_stride: int = 4
    """A video has 1 + k * `frame_stride` frames."""
    pipeline_args: dict[str, Any] = field(default_factory=dict)

    @property
    def is_video(self) -> bool:
        return self.sizes[0].num_frames > 1

    @property
    def has_images(self) -> bool:
        return len(self.sizes[0].sources) > 0


KLEIN_PX, WIDE_PX = (64, 64), (96, 32)
"""Width and height of an image that FLUX.2's pipeline takes, and reads at its own size; of one
that Qwen-Image-2.1 reads at 32 x 96 px."""
CASES = (
    Case("flux2_klein", cfg_with_embeds, edits("flux2", KLEIN_PX), max_tokens=512, word_limit=503, source_px=KLEIN_PX),
    Case("flux_dev", true_cfg, max_tokens=512, word_limit=511),
    Case("flux_kontext", true_cfg, edits("flux_kontext"), max_tokens=512, word_limit=511),
    Case("flux_schnell", true_cfg, word_limit=255, pipeline_args={"max_sequence_length": 256}),
    # 21 frames are 6 latent frames, more than the VAE decodes in one temporal tile
    Case("hunyuan_video", true_cfg, (Geometry(64, 64, 5), Geometry(32, 48, 21)), max_tokens=351, word_limit=254),
    Case("hunyuan_video15", guided_by_guider, VIDEOS, max_tokens=1108, word_limit=994),
    Case("hunyuan_video15_i2v", guided_by_guider, LISTED, max_tokens=1108, word_limit=994),
    Case(
        *("ltx2", one_scale_for_both_parts, (Geometry(64, 64, 9), Geometry(64, 96, 17)), 32),
        **{"max_tokens": 1024, "word_limit": 1023, "frame_stride": 8},
    ),
    Case("qwen_image", true_cfg, max_tokens=1058, word_limit=1018),
    Case(
        *("qwen_image21", true_cfg, edits("qwen_image_edit", WIDE_PX, (Geometry(64, 64), Geometry(32, 96))), 32),
        **{"max_tokens": 2048, "word_limit": 2027, "source_px": WIDE_PX},
    ),
    Case("qwen_image_edit", true_cfg, edits("qwen_image_edit"), max_tokens=1088, word_limit=1015),
    Case("qwen_image_edit_plus", true_cfg, edits("qwen_image_edit"), max_tokens=1088, word_limit=1018),
    Case("sd3", plain_cfg, word_limit=255),
    Case("wan2.1", plain_cfg, VIDEOS, max_tokens=512, word_limit=511),
    Case("wan2.1_i2v", plain_cfg, CONTINUED, max_tokens=512, word_limit=511),
    Case("wan2.2_a14b", plain_cfg, VIDEOS, max_tokens=512, word_limit=511),
    Case("wan2.2_i2v_a14b", plain_cfg, CONTINUED, max_tokens=512, word_limit=511),
    Case("wan2.2_ti2v_5b", plain_cfg, (Geometry(64, 64, 5), Geometry(32, 96, 9)), 32, max_tokens=512, word_limit=511),
    Case("wan2.2_ti2v_5b_i2v", plain_cfg, FIRST_FRAMES, 32, max_tokens=512, word_limit=511),
    Case("z_image", cfg_from_zero, max_tokens=512, word_limit=503),
)


def changed(checkpoint: Path, folder: Path, file: str, change: dict[str, Any]) -> Path:
    """A copy of the checkpoint in `folder`, without weights, whose JSON file has these values."""
    copy = Path(shutil.copytree(checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors")))
    (copy / file).write_text(json.dumps(json.loads((copy / file).read_text()) | change))
    return copy


class Loaded:
    """Checkpoint of a case; each part is loaded at its first use."""

    def __init__(self, case: Case, path: Path):
        self.case = case
        self.path = path
        self.model: DiffusionModel = load_model(path)
        self.images: tuple[SourceImage, ...] = ()
        """Images of every prompt."""
        if case.has_images:
            self.images = (draw_image(path.parent / "source.png", case.source_px),)

    @classmethod
    def tiny(cls, name: str, folder: Path) -> "Loaded":
        """The case of this name, whose checkpoint is built in `folder`."""
        (case,) = (case for case in CASES if case.name == name)
        return cls(case, build_tiny(name, folder))

    @cached_property
    def transformer(self) -> nn.Module:
        return self.model.load_transformer(torch.float32).requires_grad_(False)

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encode each prompt once, by itself as the model's own encoder does; conditions are read only."""
        encode = self.model.load_encoder(torch.float32, CPU)
        known = cache(lambda prompt: encode([prompt])[0])
        return PromptEncoder(lambda prompts: [known(prompt) for prompt in prompts], encode.modules)

    def encode(self, texts: Sequence[str], geometry: Geometry | None = None) -> list[Condition]:
        """Conditions of texts, each of them about `images`, for the first size of the case or for `geometry`."""
        return self.of_texts(self.encoder, geometry)(texts)

    def of_texts(self, encode: PromptEncoder, geometry: Geometry | None = None) -> TextEncoder:
        """Turn an encoder into a function of texts, each of them about `images`."""
        size = geometry or self.case.sizes[0]
        return lambda texts: encode([inputs_of(text, self.images, size, IMAGE_PX) for text in texts])

    @cached_property
    def pipeline(self) -> Any:
        return self.load_pipeline(torch.float32)

    def load_pipeline(self, dtype: torch.dtype) -> Any:
        """Load diffusers' pipeline, with the checkpoint's own scheduler."""
        loaded = load_pipeline(self.model, self.case.sizes[0], dtype)
        if isinstance(loaded.vae, AutoencoderKLHunyuanVideo15):
            loaded.vae.enable_slicing()  # its attention takes one video at a time
        return loaded

    def run_pipeline(
        self, geometry: Geometry, scale: float, latents: Tensor, *, pipeline: Any = None, output: int = 0, **more: Any
    ) -> Tensor:
        """Output of the pipeline for PROMPTS and these initial latents; number `output`, where it has several."""
        pipeline = pipeline or self.pipeline
        if self.case.guidance is guided_by_guider:
            pipeline.guider = pipeline.guider.new(guidance_scale=scale)
        size = size_of(pipeline, self.model, geometry)
        if self.case.is_video:
            size["num_frames"] = geometry.num_frames
        arguments = {"num_inference_steps": NUM_STEPS, "output_type": "latent"} | self.case.pipeline_args
        arguments |= self.case.guidance(scale) | more
        latents = self.model.pipeline_start(latents, geometry)
        if "negative_prompt_embeds" in arguments:
            arguments["negative_prompt_embeds"] = pipeline.encode_prompt(NEGATIVE)[0]
        if self.case.has_images:
            made = self._run_each(pipeline, geometry, latents, **size, **arguments)
        else:
            run = self.model.pipeline_call(pipeline, geometry)
            made = _made(run, output, prompt=list(PROMPTS), latents=latents, **size, **arguments)
        return self.model.pipeline_end(made, geometry) if arguments["output_type"] == "latent" else made

    def _run_each(self, pipeline: Any, geometry: Geometry, latents: Tensor, **arguments: Any) -> Tensor:
        """Run a pipeline that takes one prompt at a time, with images at their sizes in `geometry`, if there are."""
        if arguments.get("negative_prompt") is not None:
            arguments["negative_prompt"] = arguments["negative_prompt"][0]
        if self.images:
            arguments["image"] = pictures_of(self.model, [image.read() for image in self.images])
        with images_read_at(pipeline, IMAGE_PX, geometry.sources):
            made = [
                _made(pipeline, 0, prompt=prompt, latents=start[None], **arguments)
                for prompt, start in zip(PROMPTS, latents, strict=True)
            ]
        return torch.cat(made)


def _made(run: Callable[..., Any], output: int, **arguments: Any) -> Tensor:
    """Output of a pipeline: pixels or, for number 1, sound; final latents as the network reads them."""
    if arguments["output_type"] == "latent":
        return final_latents(run, **arguments)
    made = torch.as_tensor(run(**arguments)[output])
    return made if made.shape[-1] != 4 else made[..., :3] * made[..., 3:] + 1 - made[..., 3:]  # opacity, over white


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
