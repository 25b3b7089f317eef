# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo's network without an attention mask where no prompt is padded.

diffusers' forward masks padded text tokens in every block, and makes the mask also where there is no padding. A mask
keeps fused attention kernels out, although a tile of one prompt's rows has no padding. Here the mask is an optional
input.

Invariant (tests/models/test_hunyuan_video.py): velocities and gradients equal diffusers' own forward, to 1e-5.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from torch import Tensor

from verl_digen.models.sequence import own_share

POSITIONS = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
SEQUENCE_PLAN = {
    "x_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
    "rope": {0: POSITIONS, 1: POSITIONS},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}
"""Plan of diffusers' context parallelism, which diffusers has none of for this network. The forward itself takes the
share of the prompt (`own_share`), behind the text refiner, which reads it whole."""


def run_unmasked(network: Any) -> None:
    """Replace the forward of a `HunyuanVideoTransformer3DModel` as described above; its weights are unchanged."""
    network.forward = MethodType(_forward, network)
    network.sequence_mesh = None


def _forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    pooled_projections: Tensor,
    encoder_attention_mask: Tensor | None = None,
    guidance: Tensor | None = None,
) -> tuple[Tensor]:
    """Replacement of the class's forward, with the same arguments.

    Args:
        hidden_states: [N, C, F, H, W]. timestep: [N]. encoder_hidden_states: [N, L, D]. pooled_projections: [N, E].
            encoder_attention_mask: [N, L], 1 for tokens; None: no padding. guidance: [N], of a distilled network.

    Returns:
        (velocity [N, C', F, H, W],)
    """
    patch = (network.config.patch_size_t, network.config.patch_size, network.config.patch_size)
    grid = [size // side for size, side in zip(hidden_states.shape[2:], patch, strict=True)]
    positions = network.rope(hidden_states)
    time, _ = network.time_text_embed(timestep, pooled_projections, guidance)
    video = network.x_embedder(hidden_states)
    text = network.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
    text, text_mask = own_share(network, text, encoder_attention_mask)
    takes_part = None
    if text_mask is not None:
        takes_part = torch.cat([torch.ones_like(video[..., 0]), text_mask], dim=1).bool()[:, None, None]

    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in (*network.transformer_blocks, *network.single_transformer_blocks):
        given = (video, text, time, takes_part, positions)
        video, text = network._gradient_checkpointing_func(block, *given) if recomputes else block(*given)

    patches = network.proj_out(network.norm_out(video, time)).unflatten(1, grid).unflatten(-1, (-1, *patch))
    return (patches.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3),)
