# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5's network without a first frame, as text to video runs it.

diffusers' own forward looks at values to decide on shapes: whether there is a first frame, and which text tokens are
padding, to put those last. A device is waited for in every forward, and without memory (`digen plan`) there are no
values. Here every token stays where it is, under its mask: text tokens have no positions, so their order is nothing to
the network. The 729 masked tokens that stand for no first frame are left out.

Invariant (tests/models): velocities are those of diffusers' own forward, to 1e-5.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PROMPT_TYPE, GLYPH_TYPE = 0, 1
"""What the network is told that a text token is."""


def forward_text_to_video(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    encoder_attention_mask: Tensor,
    encoder_hidden_states_2: Tensor,
    encoder_attention_mask_2: Tensor,
) -> tuple[Tensor]:
    """In place of `HunyuanVideo15Transformer3DModel.forward`, with its arguments.

    Args:
        hidden_states: [N, C, F, H, W]. timestep: [N]. encoder_hidden_states, encoder_attention_mask: [N, L, D] and
            [N, L] of prompts; the same with _2: [N, G, E] and [N, G] of glyphs, G may be 0.

    Returns:
        (velocity [N, C', F, H, W],)
    """
    patch = (network.config.patch_size_t, network.config.patch_size, network.config.patch_size)
    grid = [size // side for size, side in zip(hidden_states.shape[2:], patch, strict=True)]

    def of_type(tokens: Tensor, number: int) -> Tensor:
        return tokens + network.cond_type_embed(torch.full(tokens.shape[:2], number, device=tokens.device))

    positions = network.rope(hidden_states)
    time = network.time_embed(timestep)
    video = network.x_embedder(hidden_states)
    prompt = of_type(network.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask), PROMPT_TYPE)
    glyphs = of_type(network.context_embedder_2(encoder_hidden_states_2), GLYPH_TYPE)
    text = torch.cat([glyphs, prompt], dim=1)
    mask = torch.cat([encoder_attention_mask_2, encoder_attention_mask], dim=1).bool()

    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in network.transformer_blocks:
        given = (video, text, time, mask, positions)
        video, text = network._gradient_checkpointing_func(block, *given) if recomputes else block(*given)

    patches = network.proj_out(network.norm_out(video, time)).unflatten(1, grid).unflatten(-1, (-1, *patch))
    return (patches.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3),)
