# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's network, with and without a first frame: diffusers' own except for two things.

- diffusers' forward reads tensor values to decide on shapes: if there is a first frame, and which text tokens are
  padding, to move those last. This synchronizes with the device in every forward, and fake tensors (`digen plan`) have
  no values. Here every token stays in place, under its mask: text tokens have no positions, so their order does not
  matter to the network. The 729 masked tokens of a missing first frame are left out; an image's come first.
- diffusers' blocks build a mask of all pairs of tokens, gigabytes for a video, with or without padding. Here the mask
  is over keys only, and there is none without padding. Outputs of masked queries are never used.

Invariant (tests/models): velocities and gradients equal diffusers' own forward, to 1e-5.
"""

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor, nn

from verl_digen.models.hunyuan_video import run_blocks

PROMPT_TYPE, GLYPH_TYPE, IMAGE_TYPE = 0, 1, 2
"""Type ids of the prompt's tokens, inputs of `cond_type_embed`."""


def forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_hidden_states_2: Tensor,
    encoder_attention_mask: Tensor | None = None,
    encoder_attention_mask_2: Tensor | None = None,
    image_embeds: Tensor | None = None,
) -> tuple[Tensor]:
    """Replacement of the class's forward, with the same arguments -> (velocity [N, C', F, H, W],). `hidden_states`: [N,
    C, F, H, W]. `encoder_hidden_states`, `encoder_attention_mask`: [N, L, D] and [N, L] of prompts; with _2: [N, G, E]
    and [N, G] of glyphs, G may be 0. No mask: no padding. `image_embeds`: [N, V, I] of the first frame, if there is
    one."""

    def of_type(tokens: Tensor, number: int) -> Tensor:
        return tokens + network.cond_type_embed(torch.full(tokens.shape[:2], number, device=tokens.device))

    prompt = of_type(network.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask), PROMPT_TYPE)
    glyphs = of_type(network.context_embedder_2(encoder_hidden_states_2), GLYPH_TYPE)
    parts = [(encoder_attention_mask_2, glyphs), (encoder_attention_mask, prompt)]
    if image_embeds is not None:
        parts.insert(0, (None, of_type(network.image_embedder(image_embeds), IMAGE_TYPE)))
    text = torch.cat([tokens for _, tokens in parts], dim=1)
    text_mask = None
    if encoder_attention_mask is not None or encoder_attention_mask_2 is not None:
        text_mask = torch.cat(
            [torch.ones_like(tokens[..., 0]) if mask is None else mask for mask, tokens in parts], dim=1
        )
    time = network.time_embed(timestep)
    return run_blocks(network, network.transformer_blocks, hidden_states, time, text, text_mask)


class KeyMasked:
    """Joint attention of a block over video and text tokens; only video tokens have positions."""

    _attention_backend = None
    _parallel_config = None
    """Set by diffusers, like `_attention_backend`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None,
        image_rotary_emb: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Run the attention. `hidden_states`, `encoder_hidden_states`: [N, V, D] of the video, [N, T, D] of text.
        `attention_mask`: bool [N, 1, 1, V + T], True for keys that take part."""

        def heads(layer: nn.Module, tokens: Tensor) -> Tensor:
            return layer(tokens).unflatten(2, (attn.heads, -1))

        def placed(tokens: Tensor) -> Tensor:
            return apply_rotary_emb(tokens, image_rotary_emb, sequence_dim=1)  # type: ignore[return-value]

        query = placed(attn.norm_q(heads(attn.to_q, hidden_states)))
        key = placed(attn.norm_k(heads(attn.to_k, hidden_states)))
        text_query = attn.norm_added_q(heads(attn.add_q_proj, encoder_hidden_states))
        text_key = attn.norm_added_k(heads(attn.add_k_proj, encoder_hidden_states))
        answers = dispatch_attention_fn(
            torch.cat([query, text_query], dim=1),
            torch.cat([key, text_key], dim=1),
            torch.cat([heads(attn.to_v, hidden_states), heads(attn.add_v_proj, encoder_hidden_states)], dim=1),
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        ).flatten(2, 3)
        video, text = answers.split([hidden_states.shape[1], encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](video)), attn.to_add_out(text)
