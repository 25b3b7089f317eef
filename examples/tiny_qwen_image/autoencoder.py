# SPDX-License-Identifier: Apache-2.0
"""Train a tiny AutoencoderKLQwenImage on drawings: 8x8 pixels to one latent of 16 channels.

- The latents carry noise while the decoder learns, so that pictures survive the rest of the noise that a
  stochastic sampler leaves in them.
- The causal 3D convolutions see one frame, so only their last temporal tap does anything; they are trained as
  the 2D convolutions they then are, and the other taps are set to 0.
- In the end the latents are whitened, which makes them much easier to learn; `latents_mean` and `latents_std`
  go to the config, where the pipeline reads them.
"""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from snapshot import Snapshot
from torch.nn import functional as F

from verl_digen.models.qwen_image import take_one_frame

logger = logging.getLogger(__name__)

CROP_PX = 32

CONFIG = {
    "base_dim": 8,
    "z_dim": 16,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, False, False],
    "latents_mean": [0.0] * 16,
    "latents_std": [1.0] * 16,
}

PEAK_LR = 2e-3

CROP_SHARE = 0.7
"""Share of the steps that train on square crops around something drawn, which are less work; then whole pictures."""

OBJECT_WEIGHT = 4.0
"""Weight of the error at and near a shape; elsewhere it is 1."""

KL_WEIGHT = 3e-4
"""Per latent dimension, against an absolute error per pixel channel."""


class OneFrame:
    """Within this context the causal convolutions of `vae` run in 2D: the same for one frame, but faster."""

    def __init__(self, vae: AutoencoderKLQwenImage):
        self.vae = vae

    def __enter__(self) -> None:
        take_one_frame(self.vae)

    def __exit__(self, *error: object) -> None:
        for module in self.vae.modules():
            if isinstance(module, QwenImageCausalConv3d):
                del module.forward


def to_tensor(pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> fp32 [B, 3, 1, H, W] in -1..1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).unsqueeze(2).float() / 127.5 - 1


def train_autoencoder(
    draw_batch: Callable[[np.random.Generator, int], list[np.ndarray]],
    draw_world: Callable[[np.random.Generator], Sequence[np.ndarray]],
    *,
    num_steps: int,
    batch_size: int,
    seed: int,
    snapshot: Snapshot,
    start: AutoencoderKLQwenImage | None = None,
) -> AutoencoderKLQwenImage:
    """A trained autoencoder, its latent statistics in its config.

    Args:
        draw_batch: that many pictures, uint8 [H, W, 3], drawn with the generator.
        draw_world: pictures whose latents are whitened.
        start: a trained one that learns another world, and is changed; None starts from scratch.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    vae = _untrained() if start is None else start.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=num_steps, pct_start=0.1)
    parts = {"vae": vae, "optimizer": optimizer, "schedule": schedule}
    first_step = snapshot.resume(parts, rng)
    start_s = time.monotonic()
    with OneFrame(vae):
        for step in range(first_step, num_steps):
            pictures = draw_batch(rng, batch_size)
            if step < CROP_SHARE * num_steps:
                pictures = [_crop(picture, rng) for picture in pictures]
            else:
                pictures = pictures[: batch_size // 2]
            x = to_tensor(np.stack(pictures))
            mean, log_var = vae.quant_conv(vae.encoder(x)).chunk(2, dim=1)
            log_var = log_var.clamp(-10, 2)
            z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
            error = (vae.decoder(vae.post_quant_conv(z)) - x) * _importance(x)
            kl = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).mean()
            kl_weight = KL_WEIGHT * min(1.0, step / (0.2 * num_steps))
            loss = error.abs().mean() + error.square().mean() + kl_weight * kl
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 100 == 0 or step == num_steps - 1:
                logger.info(
                    "autoencoder step %d: absolute error %.4f, kl %.2f, latent std %.2f noise %.2f, %.0f s",
                    step,
                    error.abs().mean().item(),
                    kl.item(),
                    mean.std().item(),
                    torch.exp(0.5 * log_var).mean().item(),
                    time.monotonic() - start_s,
                )
            snapshot.keep(step + 1, parts, rng, is_last=step == num_steps - 1)
        vae.eval().requires_grad_(False)
        _whiten(vae, np.stack(draw_world(rng)))
    return vae


@torch.no_grad()
def _untrained() -> AutoencoderKLQwenImage:
    """An autoencoder with random weights, those of past frames 0."""
    vae = AutoencoderKLQwenImage(**CONFIG)
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.weight[:, :, :-1] = 0
            module.weight[:, :, -1] *= 3**0.5  # the default scale counts the taps that are 0 now
    vae.quant_conv.bias[CONFIG["z_dim"] :] = -4.0  # little noise to begin with
    return vae


@torch.no_grad()
def _whiten(vae: AutoencoderKLQwenImage, pictures: np.ndarray) -> None:
    """Turn and scale the latent channels, by the two 1x1 convolutions, so that signal + noise is white.

    Noise is what the latents carried in training. Without this the background's brightness is most of the
    latents' variance, and what tells the shapes apart drowns until the last few denoising steps. Channels with
    less signal than noise, which the decoder hardly sees, stay small, so `latents_std` is 1 for all.
    """
    moments = torch.cat([vae.quant_conv(vae.encoder(x)) for x in to_tensor(pictures).split(64)])
    channels = moments.shape[1] // 2
    latents, log_var = moments.transpose(0, 1).reshape(2, channels, -1)
    noise = torch.diag(log_var.exp().mean(1))
    variance, axes = torch.linalg.eigh(torch.cov(latents) + noise)
    whiten, restore = axes.T / variance.sqrt()[:, None], axes * variance.sqrt()
    weight, bias = vae.quant_conv.weight[:, :, 0, 0, 0], vae.quant_conv.bias
    weight[:channels], bias[:channels] = whiten @ weight[:channels], whiten @ bias[:channels]
    # The log-variance does not turn with the channels; from here on it is the mean noise of each new channel.
    weight[channels:], bias[channels:] = 0.0, torch.diag(whiten @ noise @ whiten.T).log()
    weight = vae.post_quant_conv.weight[:, :, 0, 0, 0]
    weight.copy_(weight @ restore)
    vae.register_to_config(latents_mean=(whiten @ latents.mean(1)).tolist(), latents_std=[1.0] * channels)


def _crop(picture: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A square of the picture, somewhere around a pixel that is not background."""
    drawn = np.argwhere((picture != picture[0, 0]).any(-1))
    corner = drawn[rng.integers(len(drawn))] - rng.integers(CROP_PX // 4, 3 * CROP_PX // 4, size=2)
    y, x = np.clip(corner, 0, np.array(picture.shape[:2]) - CROP_PX)
    return picture[y : y + CROP_PX, x : x + CROP_PX]


def _importance(x: torch.Tensor) -> torch.Tensor:
    """[B, 1, 1, H, W] weight of each pixel's error: the shapes are few pixels, and are what matters."""
    is_shape = (x - x[..., :1, -1:]).abs().amax(dim=1, keepdim=True) > 0.1
    # The shape's surroundings too, or its corners would grow round.
    near = F.max_pool2d(is_shape[:, :, 0].float(), 5, stride=1, padding=2).unsqueeze(2)
    return 1 + (OBJECT_WEIGHT - 1) * near


@torch.no_grad()
def encode(vae: AutoencoderKLQwenImage, pictures: np.ndarray) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> raw (not normalised) latents, fp32 [B, C, 1, H/8, W/8]."""
    batches = to_tensor(pictures).split(64)
    return torch.cat([vae.quant_conv(vae.encoder(x)).chunk(2, dim=1)[0] for x in batches])
