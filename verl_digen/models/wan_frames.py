# SPDX-License-Identifier: Apache-2.0
"""Encoding of an image for the Wan models that continue it, with the prompt's text.

The VAE sees the image at the size of the video, stretched to it, in fp32, and its most likely encoding counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from torch import Tensor, nn

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import PromptEncoder
from verl_digen.models.text import one_by_one
from verl_digen.models.wan import MAX_TEXT_TOKENS, Wan
from verl_digen.types import Condition


def load_frame_encoder(
    model: Wan,
    dtype: torch.dtype,
    device: torch.device,
    encode_image: Callable[[Any, PromptInputs, torch.device], Condition],
    parts: Sequence[str] = (),
) -> PromptEncoder:
    """Load the encoder of texts, and of their images.

    Args:
        encode_image: diffusers' pipeline, and inputs with an image -> what the image adds to {"embeds": [L, D]}.
        parts: folders of the encoders besides VAE and text encoder.
    """
    dtypes = {name: model.part_dtype(name, dtype) for name in ("vae", *parts)}
    pipeline: Any = WanImageToVideoPipeline.from_pretrained(
        model.path,
        transformer=None,
        transformer_2=None,
        scheduler=None,
        dtype={"default": dtype, **dtypes},
        **model.pipeline_parts(),
    )
    pipeline.vae.decoder = pipeline.vae.post_quant_conv = nn.Identity()  # the decoder's own copy has them
    modules = [pipeline.text_encoder, pipeline.vae, *(getattr(pipeline, name) for name in parts)]

    def encode(inputs: PromptInputs) -> Condition:
        embeds, _ = pipeline.encode_prompt(
            inputs.text, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS, device=device
        )
        condition = {"embeds": embeds[0, : len(pipeline.tokenizer(prompt_clean(inputs.text)).input_ids)]}
        if inputs.images:
            added = encode_image(pipeline, inputs, device)
            condition |= {name: tensor.to(dtype) for name, tensor in added.items()}
        return condition

    return one_by_one(encode, model.load_prompt_check(), device, *modules)


def frame_pipeline(model: Wan, **parts: Any) -> WanImageToVideoPipeline:
    """diffusers' pipeline of parts that are loaded, for `frame_latents` and its `encode_image`.

    Args:
        parts: vae; image_encoder and image_processor, where the network attends to the image.
    """
    own: dict[str, Any] = dict.fromkeys(("tokenizer", "text_encoder", "scheduler")) | parts
    return WanImageToVideoPipeline(**own, expand_timesteps=model.index.get("expand_timesteps", False))


def frame_latents(pipeline: Any, inputs: PromptInputs, device: torch.device) -> Tensor:
    """Latents of the image, fp32, as `WanImageToVideoPipeline` gives them to its network: [mask + C, F, H, W] of a
    video with a mask, or [C, 1, H, W] of the frame alone (`expand_timesteps`).

    Raises:
        RuntimeError: the inputs do not name the size of the video.
    """
    # "5. Prepare latent variables" of WanImageToVideoPipeline.__call__; the noise is not drawn.
    if inputs.size is None:
        raise RuntimeError("inputs with an image must name the size of the video; make them with `inputs_of`")
    num_frames, height, width = inputs.size
    pixels = pipeline.video_processor.preprocess(inputs.images[0].read(), height=height, width=width)
    given = torch.empty(0, device=device)
    size = (1, pipeline.vae.config.z_dim, height, width, num_frames, torch.float32, device)
    return pipeline.prepare_latents(pixels.to(device), *size, latents=given)[1][0]
