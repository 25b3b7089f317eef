# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1: text to image, as diffusers' `QwenImage21Pipeline` runs it, with two differences:

- Rows of a forward may have prompts of different lengths. A picture's first axis of positions is its prompt's number of
  tokens; diffusers' network takes the longest prompt's for all rows.
- Pictures are RGB: the VAE makes a fourth channel, opacity, and what is transparent becomes white.

A token is one latent position; the pipeline takes sides that are multiples of 32 px. A prompt's tokens attend to the
prompt alone, each to those before it, and are modulated as at the end of the path, whatever the picture's sigma.
"""

from collections.abc import Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import AutoencoderKLQwenImage21
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLProcessor
from transformers.processing_utils import ProcessorMixin

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PackedModel, PromptCheck
from verl_digen.models.pixels import Decoded, channel_statistics, from_pixels, posterior_mode, to_pixels
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec
from verl_digen.models.text import length_check
from verl_digen.require import require
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 2048
"""Tokens of a prompt in its template. The pipeline has no limit; the network's positions end at 8192."""


def _forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    img_shapes: Sequence[Sequence[tuple[int, int, int]]],
    encoder_hidden_states_mask: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor]:
    """Replacement of the class's forward for prompts without images, whose shapes depend on no values -> ([N, L + V,
    C'],), of which the last V are the velocity.

    `hidden_states`: [N, V, C]. `encoder_hidden_states`: [N, L, D]. `img_shapes`: of each row (1, rows, columns) of its
    picture, the same for all. `encoder_hidden_states_mask`: [N, L], True for tokens; None: no padding. The class's
    other arguments are about images and a cache of prompts.

    Invariant (tests/models/test_qwen_image21.py): velocities and gradients equal diffusers' own forward, to 1e-5.
    """
    text, picture = network.txt_in(encoder_hidden_states), network.img_in(hidden_states)
    num_text, mask = text.shape[1], encoder_hidden_states_mask
    lengths = torch.full((1,), num_text, device=text.device) if mask is None else mask.sum(1)
    tokens = torch.cat([text, picture], dim=1)
    is_picture = torch.arange(tokens.shape[1], device=tokens.device) >= num_text
    takes_part = None if mask is None else torch.cat([mask, torch.ones_like(picture[..., 0], dtype=mask.dtype)], dim=1)
    # the last one is the prompts'
    time = network.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), tokens)
    given = (
        network.modulation(time),
        _rotations(network, num_text, lengths, img_shapes[0][0]),
        None if takes_part is None else takes_part[:, None, None],
        is_picture,
        *(None, None, None),  # diffusers' cache of prompts
        num_text,
    )
    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in network.transformer_blocks:
        tokens = network._gradient_checkpointing_func(block, tokens, *given) if recomputes else block(tokens, *given)
    return (network.proj_out(network.norm_out(tokens, time, is_picture)),)


def _rotations(network: Any, num_text: int, lengths: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """(cosines, sines) [N or 1, L + V, 1, head / 2] of all tokens. `lengths`: [N or 1] tokens of each prompt."""
    rope, device = network.pos_embed, lengths.device
    rope.freqs = [table.to(device) for table in rope.freqs]  # as in diffusers; the last 1024 rows are of places below 0
    rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in shape[1:])
    places = torch.meshgrid(lengths, rows, columns, indexing="ij")  # each [N or 1, rows, columns]
    of_text = torch.cat([table[:num_text] for table in rope.freqs], dim=-1).expand(len(lengths), -1, -1)
    of_picture = torch.cat([table[place] for table, place in zip(rope.freqs, places, strict=True)], dim=-1)
    turns = torch.cat([of_text, of_picture.flatten(1, 2)], dim=1).unsqueeze(2)
    return turns.real, turns.imag


class BlockCausal:
    """Attention of a block: prompts to themselves, causal, and pictures to all tokens."""

    _attention_backend = None
    _parallel_config = None
    """Set by diffusers, like `_attention_backend`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_emb: tuple[Tensor, Tensor],
        segments: int,
        **_: None,
    ) -> Tensor:
        """Run the attention. `hidden_states`: [N, L + V, D]. `attention_mask`: bool [N, 1, 1, L + V], True for keys
        that take part. `segments`: L, with the name that diffusers' block has for it."""

        def heads(layer: nn.Module) -> Tensor:
            return layer(hidden_states).unflatten(2, (attn.heads, -1))

        def turned(tokens: Tensor) -> Tensor:
            even, odd = tokens.float().unflatten(-1, (-1, 2)).unbind(-1)
            cosines, sines = rotary_emb
            pairs = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
            return pairs.flatten(-2).to(tokens.dtype)

        def attend(asking: slice, asked: slice, **more: Any) -> Tensor:
            parts = query[:, asking], key[:, asked], value[:, asked]
            return dispatch_attention_fn(*parts, backend=self._attention_backend, **more)

        query, key = turned(attn.norm_q(heads(attn.to_q))), turned(attn.norm_k(heads(attn.to_k)))
        value, text = heads(attn.to_v), slice(segments)
        # padding follows a prompt, so that its own tokens do not see it
        answers = [
            attend(text, text, is_causal=True),
            attend(slice(segments, None), slice(None), attn_mask=attention_mask),
        ]
        return attn.to_out[1](attn.to_out[0](torch.cat(answers, dim=1).flatten(2, 3)))


class TextProcessor(Qwen3VLProcessor):
    """transformers' processor without its parts for pictures and videos, which need torchvision."""

    def __init__(self, tokenizer: Any):
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        marks = [self.image_token, self.video_token]
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(marks)
        ProcessorMixin.__init__(self, tokenizer, chat_template=tokenizer.chat_template)


class QwenImage21(PackedModel):
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
                (r"txt_in", "text"),
                (r"transformer_blocks|proj_out", "joint"),
            ),
            attention=((r"", "image", "joint"), (r"", "text", "text")),
        ),
        condition=ConditionLayout(width="context_in_dim"),
        freed={"text_encoder": ("model.visual.", "lm_head.")},  # the last hidden state alone is read
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self._require_config("transformer", f"a checkpoint such as {self.spec.example}", causal_condition=True)

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        network: Any = super().load_transformer(dtype, meta=meta)
        network.forward = MethodType(_forward, network)
        for block in network.transformer_blocks:
            block.attn.set_processor(BlockCausal())
        return network

    def pipeline_parts(self) -> dict[str, Any]:
        return {"processor": TextProcessor(AutoTokenizer.from_pretrained(self.path / "processor"))}

    def load_prompt_check(self) -> PromptCheck:
        """Load a check of the text."""
        pipeline = self.load_pipeline(torch.float32, "vae", "text_encoder")
        wrap, tokenizer = pipeline.prompt_template_t2i.format, pipeline.processor.tokenizer
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=wrap)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D]}, L the number of tokens behind the system's message."""
        return {"embeds": encode_prompt(text)[0][0]}

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

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "5. Denoising loop" of QwenImage21Pipeline.__call__; there too the timestep is rounded to the network's dtype,
        # then divided.
        dtype = self.input_dtype(transformer)
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), latents.device, dtype) / TIMESTEPS_PER_SIGMA,
            encoder_hidden_states=condition["embeds"].to(dtype),
            encoder_hidden_states_mask=condition.get("embeds_mask"),
            img_shapes=[[(1, *self._token_grid(geometry))]] * len(latents),
        )[0][:, -latents.shape[1] :]
