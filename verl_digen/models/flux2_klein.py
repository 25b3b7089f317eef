# SPDX-License-Identifier: Apache-2.0
"""FLUX.2 [klein]: text and up to four images to image, as diffusers' `Flux2KleinPipeline` runs it.

- A token is a 2x2 patch of latent positions, normalised by the running statistics of the VAE's batch norm.
- The text encoder is a Qwen3, of which the network reads three hidden states side by side, padded to 512 tokens and
  without a mask. It does not read the images.
- The network reads the tokens of the picture, then of every image (`sources.py`), each image at its own size, at the
  "time" 10, 20, ..., where the picture is at 0.
- The pipeline's classifier-free guidance has an empty negative prompt; a step-distilled checkpoint was made for none.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl_flux2 import AutoencoderKLFlux2
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline, compute_empirical_mu
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.inputs.sizes import limited_size
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PackedModel, PromptCheck
from verl_digen.models.pixels import Decoded, from_pixels, posterior_mode, to_pixels
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.sources import ReadsImages
from verl_digen.models.spec import JOINT_ATTENTION, ConditionLayout, FlopsLayout, ModelSpec, VllmOmniServing
from verl_digen.models.text import chat_text, length_check
from verl_digen.require import refusing
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 512
"""Tokens of a prompt in its chat template; the pipeline's default."""
MAX_IMAGES = 4
"""Images that the klein models take, says Black Forest Labs' documentation of editing."""
IMAGE_TIME = 10
"""Distance between the times of two images: `scale` of the pipeline's `_prepare_image_ids`."""


class Flux2Network(PackedModel):
    """The network, schedule and VAE, without images."""

    # -- the shape of the problem -------------------------------------------------------------------------
    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "6. Prepare timesteps" of Flux2KleinPipeline.__call__.
        mu = compute_empirical_mu(self.latent_shape(geometry)[0], num_steps)
        return flow_sigmas(self._schedule, sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=mu)

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        vae: Any = AutoencoderKLFlux2.from_pretrained(self.path / "vae", dtype=self.decoder_dtype(dtype))
        vae.eval().to(device)

        def statistics() -> tuple[Tensor, Tensor]:
            # Read at every call: a replica that sleeps moves the buffers away and back.
            std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
            return vae.bn.running_mean.view(1, -1, 1, 1), std.view(1, -1, 1, 1)

        def decode(latents: Tensor, geometry: Geometry) -> Decoded:
            # After "7. Denoising loop" of Flux2KleinPipeline.__call__.
            mean, std = statistics()
            grid = self.pipeline_start(latents, geometry).to(device, vae.dtype)
            unpatched = Flux2KleinPipeline._unpatchify_latents(grid * std + mean)
            return to_pixels(vae.decode(unpatched, return_dict=False)[0])

        def encode(pixels: Tensor) -> Tensor:
            # `_encode_vae_image` of Flux2KleinPipeline.
            mean, std = statistics()
            grid = Flux2KleinPipeline._patchify_latents(posterior_mode(vae, from_pixels(pixels, device, vae.dtype)))
            return Flux2KleinPipeline._pack_latents((grid - mean) / std)

        return Decoder(decode, (vae,), encode)

    def pipeline_start(self, latents: Tensor, geometry: Geometry) -> Tensor:
        return latents.transpose(1, 2).unflatten(2, self._token_grid(geometry))

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "7. Denoising loop" of Flux2KleinPipeline.__call__; there too the timestep is rounded to the latents' dtype,
        # then divided.
        dtype, device = self.input_dtype(transformer), latents.device
        num_text = condition["embeds"].shape[1]
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), device, dtype) / TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=condition["embeds"].to(dtype),
            txt_ids=to_device(torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(num_text)), device),
            img_ids=to_device(self._image_ids(geometry), device),
            return_dict=False,
        )[0]

    def _image_ids(self, geometry: Geometry) -> Tensor:
        """[tokens, 4] places of the picture's and the images' tokens: time, row, column, 0."""
        return torch.cat([self._places(0, geometry), self.source_ids(geometry, torch.int64)])

    def source_ids(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        """[tokens of all images, 4] places, on the host."""
        ids = [self._places(IMAGE_TIME * number, Geometry(*size)) for number, size in enumerate(geometry.sources, 1)]
        return torch.cat([torch.empty(0, 4, dtype=torch.int64), *ids]).to(dtype)

    def _places(self, time: int, geometry: Geometry) -> Tensor:
        rows, columns = self._token_grid(geometry)
        return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.arange(1))


class Flux2Klein(ReadsImages, Flux2Network):
    spec = ModelSpec(
        transformer="Flux2Transformer2DModel",
        title="FLUX.2 [klein]",
        example="black-forest-labs/FLUX.2-klein-base-4B",
        # Attention and feed-forward of both streams, and the first of the two layers of a single block. Its second is
        # named attn.to_out, as is a list of modules of the other blocks, which peft does not wrap.
        lora_targets=(
            *JOINT_ATTENTION,
            *("ff.linear_in", "ff.linear_out", "ff_context.linear_in", "ff_context.linear_out"),
            "attn.to_qkv_mlp_proj",
        ),
        flops=FlopsLayout(
            patch="x_embedder",
            streams=(
                (r"modulation|time_guidance_embed|norm_out\.linear", "row"),
                (r"single_transformer_blocks", "joint"),
                (r"context_embedder|ff_context|attn\.add_|to_add_out", "text"),
            ),
            attention=((r"", "joint", "joint"),),
            fused="to_qkv_mlp_proj",
        ),
        num_images=(0, MAX_IMAGES),
        image_sizes="flux2",
        condition=ConditionLayout(width="joint_attention_dim", num_tokens=MAX_TEXT_TOKENS),
        freed={"text_encoder": ("lm_head.",)},
        encodes_images=("encoder.", "quant_conv."),
        selftest={"guidance_scale": 1.0},
        vllm_omni=VllmOmniServing(pipeline="Flux2KleinPipeline", mixin=".edit_pipelines:Flux2KleinRecording"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.takes_guidance = not self.index.get("is_distilled")

    def load_prompt_check(self) -> PromptCheck:
        tokenizer = self.load_tokenizer("tokenizer")
        wrap = chat_text(tokenizer, enable_thinking=False)
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=wrap)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [512, 3 D]}."""
        embeds, _ = encode_prompt(text, max_sequence_length=MAX_TEXT_TOKENS)
        return {"embeds": embeds[0]}

    def encode_images(self, pipeline: Any, inputs: PromptInputs, device: torch.device) -> Condition:
        """Encode into {"source": [tokens of all images, channels]}. ValueError for an image of less than 64 px, and for
        one whose sides differ by more than a factor of 8, as the pipeline does."""
        return {"source": torch.cat([_encode_image(pipeline, image, inputs.image_px) for image in inputs.images])}


def _encode_image(pipeline: Any, source: SourceImage, image_px: int) -> Tensor:
    """[tokens, channels] packed latents of an image, in the VAE's dtype."""
    # "4. process images" and `prepare_image_latents` of Flux2KleinPipeline.
    processor, area_px, image = pipeline.image_processor, image_px**2, source.read()
    rule = "an image of a prompt must be one that the pipeline of FLUX.2 [klein] takes"
    with refusing(rule, source.reference, "replace it, or remove its prompt"):
        processor.check_image_input(image)
    height, width = limited_size(*image.size, area_px)
    fitting = processor._resize_if_exceeds_area(image, area_px)
    pixels = processor.preprocess(fitting, height=height, width=width, resize_mode="crop")
    latents = pipeline._encode_vae_image(pixels.to(pipeline.vae.device, pipeline.vae.dtype), None)
    return pipeline._pack_latents(latents)[0]
