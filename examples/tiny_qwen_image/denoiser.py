# SPDX-License-Identifier: Apache-2.0
"""Train a tiny QwenImageTransformer2DModel, and the text encoder with it, by flow matching.

- x_s = (1 - s) x_0 + s noise; the network gets s itself as its timestep, as the pipeline passes it, and
  learns noise - x_0.
- The weights that are kept are a running average.
"""

import copy
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from autoencoder import encode
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from snapshot import Snapshot
from text import HIDDEN_SIZE
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

logger = logging.getLogger(__name__)

TRANSFORMER_CONFIG = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 3,
    "attention_head_dim": 32,
    "num_attention_heads": 4,
    "joint_attention_dim": HIDDEN_SIZE,
    "axes_dims_rope": (8, 12, 12),
}

SCHEDULER_CONFIG = {
    "base_image_seq_len": 16,
    "base_shift": 2.0,
    "max_image_seq_len": 64,
    "max_shift": 2.5,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
"""Qwen-Image's own, but for the shift and the lengths it is given for.

What a caption speaks of is decided while the noise is above 0.85 (the latents of a flat picture repeat
themselves, so a little signal tells all); the shift puts half of the denoising steps there.
"""

PROMPT_DROPOUT = 0.1
"""Share of the training pictures whose prompt is the empty one, for classifier-free guidance."""

PX_PER_TOKEN = 16

LessonBatch = Callable[[np.random.Generator, int], tuple[torch.Tensor, list[str]]]
"""(generator, batch size) -> packed latents x_0 [B, tokens, 64] and captions."""


@dataclass(frozen=True)
class Batch:
    """Pictures to learn, and what the network reads beside their noisy latents."""

    x0: torch.Tensor
    """Packed latents [B, tokens, 64]."""
    embeds: torch.Tensor
    """[B, L, D] of the prompts."""
    mask: torch.Tensor
    """[B, L], 1 for a token of the prompt."""
    source: torch.Tensor | None = None
    """Packed latents [B, tokens, 64] of the pictures that are edited."""


def encode_packed(vae: AutoencoderKLQwenImage, pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> normalised, packed latents, fp32 [B, tokens, 64]."""
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    latents = (encode(vae, pictures) - mean) / std
    batch, channels, _, height, width = latents.shape
    return QwenImagePipeline._pack_latents(latents[:, :, 0], batch, channels, height, width)


class PromptEncoder:
    """Prompts -> (embeddings [B, L, D], mask [B, L]), by the pipeline's own code.

    Args:
        is_frozen: each prompt is encoded once, without gradients; else every time, with them.
    """

    def __init__(self, text_encoder: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer, *, is_frozen: bool):
        self.pipeline = QwenImagePipeline(
            scheduler=None, vae=None, text_encoder=text_encoder, tokenizer=tokenizer, transformer=None
        )
        self.is_frozen = is_frozen
        self.known: dict[str, torch.Tensor] = {}

    def __call__(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_frozen:
            return self.pipeline._get_qwen_prompt_embeds(prompts, device=torch.device("cpu"))
        new = sorted(set(prompts) - self.known.keys())
        if new:
            with torch.no_grad():
                embeds, mask = self.pipeline._get_qwen_prompt_embeds(new, device=torch.device("cpu"))
            self.known.update({prompt: one[: own.sum()] for prompt, one, own in zip(new, embeds, mask, strict=True)})
        found = [self.known[prompt] for prompt in prompts]
        mask = pad_sequence([torch.ones(len(one), dtype=torch.long) for one in found], batch_first=True)
        return pad_sequence(found, batch_first=True), mask


def schedule_shift(num_tokens: int) -> float:
    """The k of the time shift s' = k s / (1 + (k - 1) s) that the pipeline applies to pictures of so many tokens."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return math.exp(calculate_shift(num_tokens, *(SCHEDULER_CONFIG[name] for name in names)))


def train_denoiser(
    transformer: torch.nn.Module,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    draw_batch: LessonBatch,
    *,
    is_text_frozen: bool = False,
    **settings: Any,
) -> None:
    """One lesson: train `transformer`, and `text_encoder` unless it is frozen, in place.

    Args:
        settings: those of `fit`.
    """
    encode_prompts = PromptEncoder(text_encoder, tokenizer, is_frozen=is_text_frozen)

    def draw(rng: np.random.Generator, size: int) -> Batch:
        x0, captions = draw_batch(rng, size)
        prompts = [" " if rng.random() < PROMPT_DROPOUT else caption for caption in captions]
        return Batch(x0, *encode_prompts(prompts))

    trained = [transformer] if is_text_frozen else [transformer, text_encoder.model.language_model]
    fit(trained, draw, **settings)


def fit(
    trained: Sequence[torch.nn.Module],
    draw: Callable[[np.random.Generator, int], Batch],
    *,
    picture_px: tuple[int, int],
    num_steps: int,
    batch_size: int,
    peak_lr: float,
    seed: int,
    snapshot: Snapshot,
) -> None:
    """Train the networks in place, the first of which is the transformer.

    Args:
        draw: (generator, batch size) -> a batch; gradients may flow through its embeddings.
        picture_px: height and width of the pictures, and of the pictures that they come from.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    rows, columns = (side // PX_PER_TOKEN for side in picture_px)
    shift = schedule_shift(rows * columns)

    networks = torch.nn.ModuleList(trained)
    average = copy.deepcopy(networks)
    optimizer = torch.optim.AdamW(networks.parameters(), lr=peak_lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak_lr, total_steps=num_steps, pct_start=0.08, cycle_momentum=False
    )
    parts = {"both": networks, "average": average, "optimizer": optimizer, "schedule": schedule}
    first_step = snapshot.resume(parts, rng)
    start_s, losses = time.monotonic(), []
    for step in range(first_step, num_steps):
        loss = _loss(trained[0], draw(rng, batch_size), shift, (1, rows, columns))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(networks.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.995, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(networks.parameters()), 1 - decay)
        losses.append(loss.item())
        if step % 100 == 99 or step == num_steps - 1:
            taken_s = time.monotonic() - start_s
            logger.info("denoiser step %d: loss %.4f, %.0f s", step + 1, np.mean(losses[-100:]), taken_s)
        snapshot.keep(step + 1, parts, rng, is_last=step == num_steps - 1)
    networks.load_state_dict(average.state_dict())


def _loss(transformer: torch.nn.Module, batch: Batch, shift: float, grid: tuple[int, int, int]) -> torch.Tensor:
    """Mean square error of the velocity at random times."""
    x0, size = batch.x0, len(batch.x0)
    # One time per stratum of the batch: less noise in the loss than independent times.
    u = (torch.randperm(size) + torch.rand(size)) / size
    sigma = shift * u / (1 + (shift - 1) * u)  # as dense as the steps of the sampler
    noise = torch.randn_like(x0)
    x_t = (1 - sigma.view(-1, 1, 1)) * x0 + sigma.view(-1, 1, 1) * noise
    pictures = [x_t] if batch.source is None else [x_t, batch.source]
    velocity = transformer(
        hidden_states=torch.cat(pictures, dim=1),
        timestep=sigma,
        encoder_hidden_states=batch.embeds,
        encoder_hidden_states_mask=batch.mask,
        img_shapes=[[grid] * len(pictures)] * size,
        return_dict=False,
    )[0][:, : x0.shape[1]]
    return (velocity - (noise - x0)).square().mean()


def build_transformer(seed: int) -> QwenImageTransformer2DModel:
    """An untrained denoiser."""
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(**TRANSFORMER_CONFIG)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with Qwen-Image's settings."""
    return FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG)
