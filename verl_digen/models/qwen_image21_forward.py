# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-2.1's network: diffusers' layers, and a forward in which rows of one prompt share its tokens.

A row is text, image, text, image, ..., text, picture. Images are those of the prompt, the picture is what is made. Text
sees what comes before it; the tokens of an image or of the picture also see each other. All but the picture is
modulated as at the end of the path, whatever the picture's sigma. So a prompt's tokens are the same in all rows that
have it: they run once in a forward, not once a row (diffusers keeps their keys and values from step to step instead).

Rows of a forward may have prompts of different lengths: the padding of the last text moves only what follows it, the
picture, whose first axis of positions is that of its own prompt. diffusers' network takes the longest prompt's for all,
and reads tensor values to decide on shapes.

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
Layout = tuple[int, int, tuple[tuple[int, int], ...]]
"""Number of prompts; tokens of a prompt; and where each image among them starts and ends."""


def forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Sequence[Tensor],
    img_shapes: Sequence[Shape],
    encoder_hidden_states_mask: Tensor | None = None,
    sources: Tensor | None = None,
    prompts: Tensor | None = None,
) -> tuple[Tensor]:
    """Replacement of the class's forward, of N pictures and U prompts -> (velocity [N, V, C'],).

    `hidden_states`: [N, V, C]. `encoder_hidden_states`: [U, L_i, D] of the text in front of each image, then of the
    text in front of the picture. `img_shapes`: of the images, then of the picture, the same for all rows.
    `encoder_hidden_states_mask`: [U, L] of the last text, True for tokens; None: no padding. `sources`: [U, tokens of
    all images, C]. `prompts`: [N] int, number of each row's prompt; None: N = U, in order.
    """
    texts, mask = encoder_hidden_states, encoder_hidden_states_mask
    num_prompts, lengths = len(texts[0]), [text.shape[1] for text in texts]
    parts = [*network.txt_in(torch.cat([*texts], dim=1)).split(lengths, dim=1)]
    if sources is not None:
        images = network.img_in(sources).split([math.prod(shape) for shape in img_shapes[:-1]], dim=1)
        parts = [*chain.from_iterable(zip(parts, images, strict=False)), parts[-1]]
    ends = [*accumulate(part.shape[1] for part in parts)]
    layout: Layout = num_prompts, ends[-1], tuple(zip(ends[:-1:2], ends[1::2], strict=True))
    pictures = network.img_in(hidden_states)
    num_pictures, num_tokens = pictures.shape[:2]

    def joined(of_prompts: Tensor, of_pictures: Tensor) -> Tensor:
        """[tokens, 1, ...] of values [1 or U, 1 or P, ...] and [N, 1 or V, ...]."""
        first = of_prompts.expand(num_prompts, ends[-1], *of_prompts.shape[2:])
        second = of_pictures.expand(num_pictures, num_tokens, *of_pictures.shape[2:])
        return torch.cat([first.flatten(0, 1), second.flatten(0, 1)]).unsqueeze(1)

    takes_part = None
    if mask is not None:
        of_prompts = torch.cat([mask.new_ones(num_prompts, ends[-1] - lengths[-1]), mask], dim=1)
        of_rows = of_prompts if prompts is None else of_prompts[prompts]
        takes_part = torch.cat([of_rows, mask.new_ones(num_pictures, num_tokens)], dim=1)[:, None, None]
    tokens = joined(torch.cat(parts, dim=1), pictures)
    time = network.time_text_embed(torch.cat([timestep, timestep.new_zeros(1)]), tokens)  # the last one: the prompts'
    modulation = network.modulation(time).unsqueeze(1)
    turns = joined(*_rotations(network, lengths, img_shapes, mask, prompts, tokens.device))
    given = (
        joined(modulation[-1:], modulation[:-1]).squeeze(1),
        (turns.real, turns.imag),
        (takes_part, None if prompts is None else prompts[:, None] == torch.arange(num_prompts, device=tokens.device)),
        None,  # every token has a modulation of its own
        *(None, None, None),  # diffusers' cache of prompts
        layout,
    )
    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in network.transformer_blocks:
        tokens = network._gradient_checkpointing_func(block, tokens, *given) if recomputes else block(tokens, *given)
    pictures = tokens[num_prompts * ends[-1] :].view_as(pictures)
    return (network.proj_out(network.norm_out(pictures, time[:-1])),)


def _rotations(
    network: Any,
    lengths: Sequence[int],
    shapes: Sequence[Shape],
    mask: Tensor | None,
    prompts: Tensor | None,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Complex turns of the prompts' tokens, [1, P, head / 2], and of the pictures', [N or 1, V, head / 2]. A text's
    tokens advance on all three axes. An image stands still on the first, and is centred on 0 on the others; what
    follows it begins as far on as its longer side."""
    rope = network.pos_embed
    rope.freqs = [table.to(device) for table in rope.freqs]  # as in diffusers; the last 1024 rows are of places below 0
    turns, start = [], torch.zeros(1, dtype=torch.int64, device=device)
    for number, (length, (_, *sides)) in enumerate(zip(lengths, shapes, strict=True), 1):
        place = start[:, None] + torch.arange(length, device=device)
        start = start + (length if mask is None or number < len(lengths) else mask.sum(1))
        if prompts is not None and len(start) > 1:
            start = start[prompts]
        rows, columns = (torch.arange(side, device=device) - (side - side // 2) for side in sides)
        grid = torch.meshgrid(start, rows, columns, indexing="ij")  # each [N or 1, rows, columns]
        turns.append(torch.cat([table[place] for table in rope.freqs], dim=-1))
        turns.append(torch.cat([table[at.flatten(1)] for table, at in zip(rope.freqs, grid, strict=True)], dim=-1))
        start = start + max(sides)
    return torch.cat(turns[:-1], dim=1), turns[-1]


class BlockCausal:
    """Attention of a block: texts and images to what is in front of them, and pictures to all tokens of their row."""

    _attention_backend = None
    _parallel_config = None
    """Set by diffusers, like `_attention_backend`."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        attention_mask: tuple[Tensor | None, Tensor | None],
        rotary_emb: tuple[Tensor, Tensor],
        segments: Layout,
        **_: None,
    ) -> Tensor:
        """Run the attention. `hidden_states`: [tokens, 1, D], of U prompts, then of N pictures. `attention_mask`: bool
        [N, 1, 1, P + V], True for keys that take part; and bool [N, U], True for a row's own prompt."""

        def heads(layer: nn.Module) -> Tensor:
            return layer(hidden_states).unflatten(2, (attn.heads, -1))

        def turned(tokens: Tensor) -> Tensor:
            even, odd = tokens.float().unflatten(-1, (-1, 2)).unbind(-1)
            cosines, sines = (part.unsqueeze(2) for part in rotary_emb)
            pairs = torch.stack([even * cosines - odd * sines, even * sines + odd * cosines], dim=-1)
            return pairs.flatten(-2).to(tokens.dtype)

        def attend(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
            return dispatch_attention_fn(query, key, value, backend=self._attention_backend, **more)

        (takes_part, own), (num_prompts, num_tokens, images) = attention_mask, segments
        num_before = num_prompts * num_tokens
        num_pictures = num_prompts if own is None else len(own)
        projected = turned(attn.norm_q(heads(attn.to_q))), turned(attn.norm_k(heads(attn.to_k))), heads(attn.to_v)
        before, after = zip(*((part[:num_before], part[num_before:]) for part in projected), strict=True)
        query, key, value = (part.unflatten(0, (num_prompts, num_tokens)).squeeze(2) for part in before)
        # copies, so that backward keeps none of the pictures', which are copied below
        key, value = key.clone(), value.clone()
        # padding is the end of the last text, so that no token of a prompt sees it
        causal = attend(query, key, value, is_causal=True)
        answers, end = [], 0
        for first, last in images:
            answers += [causal[:, end:first], attend(query[:, first:last], key[:, :last], value[:, :last])]
            end = last
        answers.append(causal[:, end:])

        def of_row(part: Tensor) -> Tensor:
            """[N, P, ...] of [U, P, ...]; a product, whose backward sums in one order and in fp32."""
            return part if own is None else (own.to(part.dtype) @ part.flatten(1)).view(len(own), *part.shape[1:])

        asked, *own_parts = (part.unflatten(0, (num_pictures, -1)).squeeze(2) for part in after)
        seen = (torch.cat([of_row(part), more], dim=1) for part, more in zip((key, value), own_parts, strict=True))
        picture = attend(asked, *seen, attn_mask=takes_part)
        together = torch.cat([part.flatten(0, 1) for part in (torch.cat(answers, dim=1), picture)])
        return attn.to_out[1](attn.to_out[0](together.flatten(1).unsqueeze(1)))
