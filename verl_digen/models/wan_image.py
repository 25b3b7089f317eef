# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 and Wan2.2 A14B: image to video, as diffusers' `WanImageToVideoPipeline` runs them; all else is as in
`wan.py`.

The network reads, in further channels, the latents of a video whose first frame is the image and whose others are gray,
and a mask of that frame. Wan2.1 also attends to the image as CLIP encodes it; Wan2.2 does not. The VAE sees the image
at the size of the video, stretched to it; CLIP sees it as it is. With `digen.sampling.size_from_image` the video has
the image's shape, up to a step of 16 px. Images are encoded with the prompt, once per content and size: the VAE's most
likely encoding, in fp32 like CLIP's.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from torch import Tensor, nn
from transformers import CLIPVisionConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import Collated
from verl_digen.models.checkpoint import check_components
from verl_digen.models.sources import frame_of
from verl_digen.models.spec import VllmOmniServing
from verl_digen.models.wan import Wan
from verl_digen.types import Condition, Geometry


def frame_pipeline(model: Wan, **parts: Any) -> WanImageToVideoPipeline:
    """diffusers' pipeline of parts that are loaded, for `frame_latents` and its `encode_image`. `parts`: vae;
    image_encoder and image_processor, where the network attends to the image."""
    own: dict[str, Any] = dict.fromkeys(("tokenizer", "text_encoder", "scheduler")) | parts
    return WanImageToVideoPipeline(**own, expand_timesteps=model.index.get("expand_timesteps", False))


def frame_latents(pipeline: Any, inputs: PromptInputs, device: torch.device) -> Tensor:
    """Latents of the image, fp32, as `WanImageToVideoPipeline` gives them to its network: [mask + C, F, H, W] of a
    video with a mask, or [C, 1, H, W] of the frame alone (`expand_timesteps`). RuntimeError if the inputs do not name
    the size of the video."""
    # "5. Prepare latent variables" of WanImageToVideoPipeline.__call__; the noise is not drawn.
    if inputs.size is None:
        raise RuntimeError("inputs with an image must name the size of the video; make them with `inputs_of`")
    num_frames, height, width = inputs.size
    pixels = pipeline.video_processor.preprocess(inputs.images[0].read(), height=height, width=width)
    given = torch.empty(0, device=device)
    size = (1, pipeline.vae.config.z_dim, height, width, num_frames, torch.float32, device)
    return pipeline.prepare_latents(pixels.to(device), *size, latents=given)[1][0]


CLIP_PARTS = ("image_encoder", "image_processor")
"""Folders of a checkpoint whose network attends to the image."""


class WanImageToVideo(Wan):
    spec = replace(
        Wan.spec,
        title="Wan image to video",
        example="Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        num_images=(1, 1),
        image_sizes="wan",
        encodes_images=("encoder.", "quant_conv."),
        encodes_in_fp32=("image_encoder",),
        sequence=None,
        vllm_omni=VllmOmniServing(pipeline="WanImageToVideoPipeline", mixin=".frame_pipelines:WanImageRecording"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        has_channels = self._network["in_channels"] == 2 * self._num_channels + self._frame_stride
        reads_last = self._network["pos_embed_seq_len"] is not None
        if reads_last or not has_channels:
            raise ValueError(
                "actor_rollout_ref.model.path must hold a Wan that continues one image in channels of its own, got one "
                f"for text, or that reads a last one, in {str(self.path)!r}; choose another, such as "
                f"{self.spec.example}"
            )
        self._has_clip = self._network["image_dim"] is not None
        if self._has_clip:
            check_components(self.path, self.index, CLIP_PARTS)
            self.spec = replace(
                self.spec,
                components=(*self.spec.components, *CLIP_PARTS),
                flops=replace(
                    self.spec.flops,
                    streams=((r"image_embedder|attn2\.add_[kv]_proj", "vision"), *self.spec.flops.streams),
                    attention=((r"attn2", "image", "context"), (r"", "image", "image")),
                ),
            )

    # -- loading ------------------------------------------------------------------------------------------
    def encode_images(self, pipeline: Any, inputs: PromptInputs, device: torch.device) -> Condition:
        """Input of the network beside the video's latents, "source" [mask + C, F, H, W]; and CLIP's tokens, "image"
        [tokens, E], where it attends to them."""
        added = {"source": frame_latents(pipeline, inputs, device)}
        if self._has_clip:
            added["image"] = pipeline.encode_image(inputs.images[0].read(), device)[0]
        return added

    def pipeline_parts(self) -> dict[str, Any]:
        """CLIP's processor, which prepares images with PIL whether torchvision is installed or not."""
        if not self._has_clip:
            return {}
        return {"image_processor": CLIPImageProcessorPil.from_pretrained(self.path / "image_processor")}

    # -- the shape of the problem -------------------------------------------------------------------------
    def num_vision_tokens(self, geometry: Geometry) -> int:
        if not self._has_clip:
            return 0
        clip: Any = CLIPVisionConfig.from_pretrained(self.path / "image_encoder")
        return len(geometry.sources) * ((clip.image_size // clip.patch_size) ** 2 + 1)

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {"source": self._source_shape(geometry)}
        if self._has_clip:
            shapes["image"] = (self.num_vision_tokens(geometry), self._network["image_dim"])
        return shapes

    def _source_shape(self, geometry: Geometry) -> tuple[int, ...]:
        channels, *size = self.latent_shape(geometry)
        return (self._network["in_channels"] - channels, *size)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of WanImageToVideoPipeline.__call__.
        source, image = self.image_inputs(latents, condition, geometry)
        given = {} if image is None else {"encoder_hidden_states_image": image}
        timesteps = to_device(self.timesteps(sigmas), latents.device)
        return self._run(transformer, torch.cat([latents, source], dim=1), timesteps, sigmas, condition, **given)

    def image_inputs(self, latents: Tensor, condition: Collated, geometry: Geometry) -> tuple[Tensor, Tensor | None]:
        """Inputs of the network that come from images: [N, mask + C, F, H, W], and [N, tokens, E] or None without CLIP.
        Raises as `frame_of`."""
        source = frame_of(condition, self._source_shape(geometry), geometry)
        assert source is not None
        return source.to(latents.dtype), condition["image"] if self._has_clip else None
