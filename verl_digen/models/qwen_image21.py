# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1: text and up to ten images to image, as diffusers' `QwenImage21Pipeline` runs it, with two
differences: rows of a forward may have prompts of different lengths (`qwen_image21_forward.py`); and pictures are RGB:
the VAE makes a fourth channel, opacity, and what is transparent becomes white.

A token is one latent position; the pipeline takes sides that are multiples of 32 px. The language model reads images at
the size at which the network does, at places in the text that are the network's, too.
"""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs
from verl_digen.inputs.sizes import fitted_size
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PackedModel, PromptCheck
from verl_digen.models.pixels import Decoded, channel_statistics, from_pixels, posterior_mode, to_pixels
from verl_digen.models.qwen_image21_forward import BlockCausal, forward
from verl_digen.models.qwen_image_edit import PicturesAlone
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.sources import ReadsImages
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec
from verl_digen.models.text import length_check
from verl_digen.require import require
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 2048
"""Tokens of a prompt in its template. The pipeline has no limit; the network's positions end at 8192."""
MAX_IMAGES = 10
"""Images that the checkpoint was made for, says its model card."""
FIRST_LABEL, LABEL, FEWER_TOKENS = 7, 6, 2
"""Tokens, for plans, in front of the first image and in front of each further one; and by which the text behind
them is shorter than a text without images."""


class PictureProcessor(PicturesAlone, Qwen3VLProcessor):
    """transformers' processor without its part for videos, which needs torchvision."""


class QwenImage21(ReadsImages, PackedModel):
    spec = ModelSpec(
        transformer="QwenImage21Transformer2DModel",
        title="Qwen-Image-2.1",
        example="Qwen/Qwen-Image-2.1",
        components=("scheduler", "text_encoder", "processor", "transformer", "vae"),
        # All projections of every block.
        lora_targets=(
            *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
            *("img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"),
        ),
        flops=FlopsLayout(
            patch="img_in",
            streams=(
                (r"modulation|time_text_embed|norm_out", "row"),
                (r"txt_in", "context"),
                (r"transformer_blocks", "joint"),
                (r"proj_out", "picture"),
            ),
            attention=(
                *((r"", "picture", "joint"), (r"", "prompt", "prompt")),
                *((r"", "source", "vision"), (r"", "source", "source")),
            ),
            shares_prompts=True,
        ),
        num_images=(0, MAX_IMAGES),
        image_sizes="qwen_image_edit",
        condition=ConditionLayout(width="context_in_dim"),
        freed={"text_encoder": ("lm_head.",)},  # the last hidden state alone is read
        encodes_images=("encoder.", "quant_conv."),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._require_config("transformer", f"a checkpoint such as {self.spec.example}", causal_condition=True)

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        network: Any = super().load_transformer(dtype, meta=meta)
        network.forward = MethodType(forward, network)
        for block in network.transformer_blocks:
            block.attn.set_processor(BlockCausal())
        return network

    def pipeline_parts(self) -> dict[str, Any]:
        """The processor, which prepares images with PIL whether torchvision is installed or not."""
        folder = self.path / "processor"
        images, tokenizer = Qwen2VLImageProcessorPil.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        return {"processor": PictureProcessor(images, tokenizer, tokenizer.chat_template)}

    def load_prompt_check(self) -> PromptCheck:
        """Load a check of the text."""
        pipeline = self.load_pipeline(torch.float32, "vae", "text_encoder")
        wrap, tokenizer = pipeline.prompt_template_t2i.format, pipeline.processor.tokenizer
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=wrap)

    def encode_with(self, pipeline: Any, encode_prompt: EncodePrompt, inputs: PromptInputs) -> Condition:
        """Encode into {"embeds": [L, D]}, the text behind the system's message. With images it is the text behind the
        last one, beside "label1" [L_1, D], ..., the text in front of each, and "source" [tokens of all, channels]."""
        self.check_images(inputs)
        if not inputs.images:
            return {"embeds": encode_prompt(inputs.text)[0][0]}
        # "1. Preprocess condition images" of QwenImage21Pipeline.__call__, and `prepare_latents`.
        prepare, seen, sources = pipeline.image_processor, [], []
        for image in inputs.images:
            size = fitted_size(image.width_px, image.height_px, inputs.image_px**2)
            picture = image.read().convert("RGBA")
            seen.append(prepare.resize(picture, *size))
            pixels = prepare.preprocess(picture, *size).unsqueeze(2).to(pipeline.vae.device, pipeline.vae.dtype)
            sources.append(pipeline._encode_vae_image(pixels, None).flatten(2)[0].T)
        embeds, _, is_image = encode_prompt(inputs.text, image=seen)
        runs = [(of_image, len([*run])) for of_image, run in groupby(is_image[0].tolist())]
        parts = zip(runs, embeds[0].split([length for _, length in runs]), strict=True)
        *labels, text = (part for (of_image, _), part in parts if not of_image)
        return {"embeds": text, "source": torch.cat(sources)} | {f"label{n}": one for n, one in enumerate(labels, 1)}

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        vae: Any = AutoencoderKLQwenImage21.from_pretrained(self.path / "vae", dtype=dtype)
        vae.eval().to(device)
        inverse_std, mean = channel_statistics(vae, dtype, device)

        def decode(latents: Tensor, geometry: Geometry) -> Decoded:
            # The end of QwenImage21Pipeline.__call__.
            places = latents.transpose(1, 2).unflatten(2, (1, *self._token_grid(geometry)))
            frames = vae.decode(places.to(device, dtype) / inverse_std + mean, return_dict=False)[0][:, :, 0]
            colours, opacity = frames.split([3, 1], dim=1)
            share = (opacity * 0.5 + 0.5).clamp(0, 1)
            return to_pixels(colours.clamp(-1, 1) * share + (1 - share))

        def encode(pixels: Tensor) -> Tensor:
            # `_encode_vae_image` and `prepare_latents` of QwenImage21Pipeline.
            colours = from_pixels(pixels, device, dtype)
            frames = torch.cat([colours, torch.ones_like(colours[:, :1])], dim=1).unsqueeze(2)
            latents = torch.cat([posterior_mode(vae, one) for one in frames.split(1)])
            return ((latents - mean) * inverse_std).flatten(2).transpose(1, 2)

        return Decoder(decode, (vae,), encode)

    # -- the shape of the problem -------------------------------------------------------------------------
    def _token_grid(self, geometry: Geometry) -> tuple[int, int]:
        return geometry.height_px // self._vae_scale, geometry.width_px // self._vae_scale

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        """The checkpoint's own schedule; a distilled one's is a list (`sample_sigmas`), and of one length."""
        own = self.index.get("sample_sigmas")
        if own is None:
            return super().sigmas(num_steps, geometry)
        require(
            num_steps == len(own),
            f"digen.sampling.num_steps and val_num_steps must be {len(own)} for this {self.spec.title} checkpoint, "
            "which is distilled to them",
            num_steps,
            f"set both to {len(own)}",
        )
        return flow_sigmas(self._schedule, num_tokens=self.latent_shape(geometry)[0], sigmas=own)

    def num_image_text_tokens(self, geometry: Geometry) -> int:
        return -FEWER_TOKENS if geometry.sources else 0

    def num_vision_tokens(self, geometry: Geometry) -> int:
        """Tokens of the text in front of images."""
        return sum(self._label_lengths(geometry))

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        width, lengths = self._network["context_in_dim"], self._label_lengths(geometry)
        return super().image_conditions(geometry) | {
            f"label{n}": (length, width) for n, length in enumerate(lengths, 1)
        }

    def _label_lengths(self, geometry: Geometry) -> list[int]:
        return [FIRST_LABEL, *[LABEL] * len(geometry.sources)][: len(geometry.sources)]

    # -- the network --------------------------------------------------------------------------------------
    def collate(self, conditions: Sequence[Condition]) -> Collated:
        """Batch the U distinct objects among N conditions; with "prompts" [N], the number of each, if U < N."""
        distinct = {id(condition): condition for condition in conditions}
        collated = super().collate([*distinct.values()])
        if len(distinct) < len(conditions):
            number = {key: number for number, key in enumerate(distinct)}
            prompts = torch.tensor([number[id(condition)] for condition in conditions])
            collated["prompts"] = to_device(prompts, conditions[0]["embeds"].device)
        return collated

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "5. Denoising loop" of QwenImage21Pipeline.__call__; there too the timestep is rounded to the network's dtype,
        # then divided.
        dtype, source = self.input_dtype(transformer), self.source_of(condition, geometry)
        texts = [*(condition[f"label{n}"] for n in range(1, len(geometry.sources) + 1)), condition["embeds"]]
        sizes = [*(Geometry(*size) for size in geometry.sources), geometry]
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), latents.device, dtype) / TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=[text.to(dtype) for text in texts],
            encoder_hidden_states_mask=condition.get("embeds_mask"),
            img_shapes=[(1, *self._token_grid(size)) for size in sizes],
            sources=None if source is None else source.to(dtype),
            prompts=condition.get("prompts"),
        )[0]
