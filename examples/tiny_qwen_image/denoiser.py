# SPDX-License-Identifier: Apache-2.0
"""Train the tiny QwenImageTransformer2DModel, and the text encoder with it, by flow matching.

- x_s = (1 - s) x_0 + s noise; the network gets s itself as its timestep, as the pipeline passes it, and
  learns noise - x_0.
- In a lesson with disobedience, the pictures are true to their captions only in part: shape, colour and
  position are drawn at random with that probability. After such a lesson the model still draws recognisable
  things, but often the wrong ones, which leaves reinforcement learning something to do in minutes.
- The first lesson is without: captions that tell little teach little, and drawing is learnt far more slowly.
- The weights that are kept are a running average.
"""

import copy
import logging
import math
import time
from dataclasses import replace

import numpy as np
import torch
from autoencoder import PICTURE_PX, encode
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from text import HIDDEN_SIZE
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from verl_digen.reward.shapes.scene import (
    ANCHORS,
    COLOURS,
    SHAPES,
    Scene,
    all_scenes,
    caption,
    draw,
)

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

PICTURES_PER_SCENE = 16

NUM_IMAGE_TOKENS = (PICTURE_PX // 16) ** 2


def disobey(scene: Scene, probability: float, rng: np.random.Generator) -> Scene:
    """`scene` with its shape, colour and position each replaced by a random one with the given probability.

    Background and count stay: a model in doubt about those draws blotches, not pictures.
    """

    def pick(current: str, choices: tuple[str, ...]) -> str:
        return choices[rng.integers(len(choices))] if rng.random() < probability else current

    colours = tuple(colour for colour in COLOURS if colour != scene.background)
    return replace(
        scene,
        shape=pick(scene.shape, SHAPES),
        colour=pick(scene.colour, colours),
        position=pick(scene.position, tuple(ANCHORS)) if scene.position is not None else None,
    )


def encode_world(vae: AutoencoderKLQwenImage, seed: int) -> torch.Tensor:
    """Normalised, packed latents of some drawings of every scene, fp32 [scenes, pictures, 16, 64]."""
    rng = np.random.default_rng(seed)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    packed = []
    for scene in all_scenes():
        pictures = np.stack([draw(scene, PICTURE_PX, rng) for _ in range(PICTURES_PER_SCENE)])
        latents = (encode(vae, pictures) - mean) / std
        batch, channels, _, height, width = latents.shape
        packed.append(QwenImagePipeline._pack_latents(latents[:, :, 0], batch, channels, height, width))
    return torch.stack(packed)


class PromptEncoder:
    """Prompts -> (embeddings [B, L, D], mask [B, L]), by the pipeline's own code, with gradients."""

    def __init__(self, text_encoder: Qwen2_5_VLForConditionalGeneration, tokenizer: Qwen2Tokenizer):
        self.pipeline = QwenImagePipeline(
            scheduler=None, vae=None, text_encoder=text_encoder, tokenizer=tokenizer, transformer=None
        )

    def __call__(self, prompts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pipeline._get_qwen_prompt_embeds(prompts, device=torch.device("cpu"))


def schedule_shift() -> float:
    """The k of the time shift s' = k s / (1 + (k - 1) s) that the pipeline applies at this picture size."""
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return math.exp(calculate_shift(NUM_IMAGE_TOKENS, *(SCHEDULER_CONFIG[name] for name in names)))


def train_denoiser(
    transformer: torch.nn.Module,
    text_encoder: Qwen2_5_VLForConditionalGeneration,
    tokenizer: Qwen2Tokenizer,
    latents: torch.Tensor,
    *,
    num_steps: int,
    batch_size: int,
    peak_lr: float,
    disobedience: float,
    seed: int,
) -> None:
    """One lesson: train `transformer` and `text_encoder` in place on `encode_world`'s latents.

    `disobedience` is the probability with which an attribute of a picture is not what its caption says.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    scenes = all_scenes()
    index = {scene: i for i, scene in enumerate(scenes)}
    captions = [caption(scene) for scene in scenes]
    encode_prompts = PromptEncoder(text_encoder, tokenizer)
    side = PICTURE_PX // 16
    shift = schedule_shift()

    both = torch.nn.ModuleList([transformer, text_encoder.model.language_model])
    average = copy.deepcopy(both)
    optimizer = torch.optim.AdamW(both.parameters(), lr=peak_lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, peak_lr, total_steps=num_steps, pct_start=0.08, cycle_momentum=False
    )
    start_s, losses = time.monotonic(), []
    for step in range(num_steps):
        asked = rng.integers(len(scenes), size=batch_size)
        shown = [index[disobey(scenes[i], disobedience, rng)] for i in asked]
        x0 = latents[shown, rng.integers(PICTURES_PER_SCENE, size=batch_size)]
        prompts = [" " if rng.random() < PROMPT_DROPOUT else captions[i] for i in asked]
        embeds, mask = encode_prompts(prompts)
        # One time per stratum of the batch: less noise in the loss than independent times.
        u = (torch.randperm(batch_size) + torch.rand(batch_size)) / batch_size
        sigma = shift * u / (1 + (shift - 1) * u)  # as dense as the steps of the sampler
        noise = torch.randn_like(x0)
        x_t = (1 - sigma.view(-1, 1, 1)) * x0 + sigma.view(-1, 1, 1) * noise
        velocity = transformer(
            hidden_states=x_t,
            timestep=sigma,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask,
            img_shapes=[[(1, side, side)]] * batch_size,
            return_dict=False,
        )[0]
        loss = (velocity - (noise - x0)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        decay = min(0.995, (1 + step) / (10 + step))
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(both.parameters()), 1 - decay)
        losses.append(loss.item())
        if step % 100 == 99 or step == num_steps - 1:
            taken_s = time.monotonic() - start_s
            logger.info("denoiser step %d: loss %.4f, %.0f s", step + 1, np.mean(losses[-100:]), taken_s)
    both.load_state_dict(average.state_dict())


def build_transformer(seed: int) -> QwenImageTransformer2DModel:
    """An untrained denoiser."""
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(**TRANSFORMER_CONFIG)


def build_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The scheduler with Qwen-Image's settings."""
    return FlowMatchEulerDiscreteScheduler(**SCHEDULER_CONFIG)
