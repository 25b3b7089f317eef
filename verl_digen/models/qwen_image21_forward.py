# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1's network: diffusers' own, but for a forward that reads no tensor values to decide on shapes.

A row is text, image, text, image, ..., text, picture. Images are those of the prompt, the picture is what is made. Text
sees what comes before it; the tokens of an image or of the picture also see each other. All but the picture is
modulated as at the end of the path, whatever the picture's sigma.

Rows of a forward may have prompts of different lengths: the padding of the last text moves only what follows it, the
picture, whose first axis of positions is that of its own row. diffusers' network takes the longest prompt's for all.

Invariant (tests/models/test_qwen_image21.py): velocities and gradients equal diffusers' own forward, to 1e-5.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch import Tensor, nn

Shape = tuple[int, int, int]
"""(1, rows, columns) of an image's or picture's tokens."""
Segments = tuple[int, tuple[tuple[int, int], ...]]
"""Tokens in front of the picture; and where each image among them starts and ends."""


def forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Sequence[Tensor],
    img_shapes: Sequence[Shape],
    encoder_hidden_states_mask: Tensor | None = None,
) -> tuple[Tensor]:
    """Replacement of the class's forward -> ([N, tokens, C'],), of which the last V are the velocity.

    `hidden_states`: [N, tokens of all images and V of the picture, C]. `encoder_hidden_states`: [N, L_i, D] of the text
    in front of each image, then of the text in front of the picture. `img_shapes`: of the images, then of the picture,
    the same for all rows. `encoder_hidden_states_mask`: [N, L] of the last text, True for tokens; None: no padding.
    """
    lengths = [text.shape[1] for text in encoder_hidden_states]
    texts = network.txt_in(torch.cat([*encoder_hidden_states], dim=1)).split(lengths, dim=1)
    images = network.img_in(hidden_states).split([math.prod(shape) for shape in img_shapes], dim=1)
    parts = [*chain.from_iterable(zip(texts, images, strict=True))]
    ends = [*accumulate(part.shape[1] for part in parts)]
    segments: Segments = ends[-2], tuple(zip(ends[:-2:2], ends[1:-2:2], strict=True))
    tokens, mask = torch.cat(parts, dim=1), encoder_hidden_states_mask
    is_picture = torch.arange(ends[-1], device=tokens.device) >= ends[-2]
    takes_part = None
    if mask is not None:
        before, after = (mask.new_ones(len(mask), number) for number in (ends[-2] - lengths[-1], images[-1].shape[1]))
        takes_part = torch.cat([before, mask, after], dim=1)[:, None, None]
    # the last one is the prompts'
    time = network.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), tokens)
    given = (
        network.modulation(time),
        _rotations(network, lengths, img_shapes, mask, tokens.device),
        takes_part,
        is_picture,
        *(None, None, None),  # diffusers' cache of prompts
        segments,
    )
    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in network.transformer_blocks:
        tokens = network._gradient_checkpointing_func(block, tokens, *given) if recomputes else block(tokens, *given)
    return (network.proj_out(network.norm_out(tokens, time, is_picture)),)


def _rotations(
    network: Any, lengths: Sequence[int], shapes: Sequence[Shape], mask: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(cosines, sines) [N or 1, tokens, 1, head / 2]. A text's tokens advance on all three axes. An image stands still
    on the first, and is centred on 0 on the others; what follows it begins as far on as its longer side."""
    rope = network.pos_embed
    rope.freqs = [table.to(device) for table in rope.freqs]  # as in diffusers; the last 1024 rows are of places below 0
    turns, start = [], torch.zeros(1, dtype=torch.int64, device=device)
    for number, (length, (_, *sides)) in enumerate(zip(lengths, shapes, strict=True), 1):
        place = start[:, None] + torch.arange(length, device=device)
        start = start + (length if mask is None or number < len(lengths) else mask.sum(1))
        rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in sides)
        grid = torch.meshgrid(start, rows, columns, indexing="ij")  # each [N or 1, rows, columns]
        turns.append(torch.cat([table[place] for table in rope.freqs], dim=-1))
        turns.append(torch.cat([table[at.flatten(1)] for table, at in zip(rope.freqs, grid, strict=True)], dim=-1))
        start = start + max(sides)
    num_rows = len(turns[-1])
    joined = torch.cat([part.expand(num_rows, -1, -1) for part in turns], dim=1).unsqueeze(2)
    return joined.real, joined.imag


class BlockCausal:
    """Attention of a block: texts and images to what is in front of them, and pictures to all tokens."""

    _attention_backend = None
    _parallel_config = None
    """Set by diffusers, like `_attention_backend`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        rotary_emb: tuple[Tensor, Tensor],
        segments: Segments,
        **_: None,
    ) -> Tensor:
        """Run the attention. `hidden_states`: [N, tokens, D]. `attention_mask`: bool [N, 1, 1, tokens], True for keys
        that take part. `segments` has the name that diffusers' block has for it."""

        def heads(layer: nn.Module) -> Tensor:
            return layer(hidden_states).unflatten(2, (attn.heads, -1))

        def turned(tokens: Tensor) -> Tensor:
            even, odd = tokens.float().unflatten(-1, (-1, 2)).unbind(-1)
            cosines, sines = rotary_emb
            pairs = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
            return pairs.flatten(-2).to(tokens.dtype)

        def attend(start: int, end: int | None, last: int | None, **more: Any) -> Tensor:
            parts = query[:, start:end], key[:, :last], value[:, :last]
            return dispatch_attention_fn(*parts, backend=self._attention_backend, **more)

        query, key = turned(attn.norm_q(heads(attn.to_q))), turned(attn.norm_k(heads(attn.to_k)))
        value, (num_before, images) = heads(attn.to_v), segments
        # padding is the end of the last text, so that no token in front of the picture sees it
        causal = attend(0, num_before, num_before, is_causal=True)
        answers, end = [], 0
        for first, last in images:
            answers += [causal[:, end:first], attend(first, last, last)]
            end = last
        answers += [causal[:, end:], attend(num_before, None, None, attn_mask=attention_mask)]
        return attn.to_out[1](attn.to_out[0](torch.cat(answers, dim=1).flatten(2, 3)))
