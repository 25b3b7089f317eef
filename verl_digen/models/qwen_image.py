# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image: text to image, as diffusers' `QwenImagePipeline` runs it. A token is a 2x2 patch of latent positions, so
both sides of a picture are multiples of 16 px (with the published VAE).

The pipeline's own methods are used where they work alone: prompt template and encoding, time shift, unpacking. The few
lines repeated here from its `__call__` name their source.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage, QwenImageCausalConv3d
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from torch import Tensor, nn
from torch.nn import functional as F

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PackedModel, PromptCheck
from verl_digen.models.pixels import Decoded, channel_statistics, encode_each, to_pixels
from verl_digen.models.sequence import pad_prompts
from verl_digen.models.spec import (
    JOINT_ATTENTION,
    MODULATION,
    ConditionLayout,
    FlopsLayout,
    ModelSpec,
    SequenceLayout,
    VllmOmniServing,
)
from verl_digen.models.text import length_check
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 1024
"""Longest prompt in tokens, with the 5 that end the template: the pipeline's upper limit; its default is 512."""


def take_one_frame(vae: nn.Module) -> None:
    """Have a VAE, which gets single frames, [B, C, 1, H, W], compute its causal convolutions as 2D convolutions. Frames
    before the first are zeros, so only the last temporal tap counts; a 3D convolution would multiply the zeros."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = partial(_conv_one_frame, module)


def _conv_one_frame(conv: QwenImageCausalConv3d, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
    padding = (int(conv._padding[2]), int(conv._padding[0]))
    return F.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, conv.stride[1:], padding).unsqueeze(2)


class QwenImage(PackedModel):
    spec = ModelSpec(
        transformer="QwenImageTransformer2DModel",
        title="Qwen-Image",
        example="Qwen/Qwen-Image",
        # All projections of both streams, as flow_grpo trains Qwen-Image.
        lora_targets=(
            *JOINT_ATTENTION,
            *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        ),
        flops=FlopsLayout(
            patch="img_in",
            streams=((rf"{MODULATION}|img_mod|txt_mod", "row"), (r"txt_in|txt_mlp|attn\.add_|to_add_out", "text")),
            attention=((r"", "joint", "joint"),),
        ),
        condition=ConditionLayout(width="joint_attention_dim"),
        freed={"text_encoder": ("model.visual.", "lm_head.")},  # the last hidden state alone is read
        sequence=SequenceLayout(splits_prompts=True),
        vllm_omni=VllmOmniServing(
            pipeline="QwenImagePipeline", mixin=".step_mode:StepRecordingMixin", is_stepwise=True
        ),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._require_config("transformer", "a checkpoint that is not guidance-distilled", guidance_embeds=False)

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        """Load a check of the text alone; the tokens of images are not counted."""
        pipeline = self.load_pipeline(torch.float32, "vae", "text_encoder")
        limit = pipeline.prompt_template_encode_start_idx + MAX_TEXT_TOKENS
        wrap = pipeline.prompt_template_encode.format
        return length_check(pipeline.tokenizer, title=self.spec.title, max_tokens=limit, wrap=wrap)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D]}, L the prompt's own number of tokens."""
        embeds, _ = encode_prompt(text, max_sequence_length=MAX_TEXT_TOKENS)
        return {"embeds": embeds[0]}

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        vae = AutoencoderKLQwenImage.from_pretrained(self.path / "vae", dtype=dtype)
        assert isinstance(vae, AutoencoderKLQwenImage)
        take_one_frame(vae)
        vae.eval().to(device)  # pyright: ignore[reportArgumentType]: diffusers decorates it as a callable object
        inverse_std, mean = channel_statistics(vae, dtype, device)

        def decode(latents: Tensor, geometry: Geometry) -> Decoded:
            # The end of QwenImagePipeline.__call__.
            unpacked = QwenImagePipeline._unpack_latents(
                latents, geometry.height_px, geometry.width_px, self._vae_scale
            )
            denormalised = unpacked.to(device, dtype) / inverse_std + mean
            return to_pixels(vae.decode(denormalised, return_dict=False)[0][:, :, 0])

        def encode(pixels: Tensor) -> Tensor:
            # `_encode_vae_image` and `prepare_latents` of QwenImageEditPipeline.
            latents = (encode_each(vae, pixels, device, dtype) - mean) * inverse_std
            batch, channels, _, rows, columns = latents.shape
            return QwenImagePipeline._pack_latents(latents, batch, channels, rows, columns)

        return Decoder(decode, (vae,), encode)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of QwenImagePipeline.__call__; there too the timestep is rounded to the
        # network's dtype, then divided.
        dtype = self.input_dtype(transformer)
        timesteps = to_device(self.timesteps(sigmas), latents.device, dtype) / TIMESTEPS_PER_SIGMA
        embeds, mask = pad_prompts(condition["embeds"], condition.get("embeds_mask"), self.sequence_size)
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=embeds.to(dtype),
            encoder_hidden_states_mask=mask,
            img_shapes=[self._image_shapes(geometry)] * len(latents),
            return_dict=False,
        )[0]

    def _image_shapes(self, geometry: Geometry) -> list[tuple[int, int, int]]:
        """(frames, rows, columns) of tokens of each picture that the network reads."""
        return [(1, *self._token_grid(geometry))]

    def guide(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """v_neg + scale (v_pos - v_neg), each token rescaled to the norm of v_pos."""
        combined = negative + scale * (positive - negative)
        return combined * (positive.norm(dim=-1, keepdim=True) / combined.norm(dim=-1, keepdim=True))
