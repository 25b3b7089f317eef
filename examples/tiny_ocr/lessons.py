# SPDX-License-Identifier: Apache-2.0
"""Lessons in writing words: pictures and captions of the world of `words`.

- In a lesson with misspelling, each letter of a picture is a random one with that probability. After it the model still
  writes letters, but often wrong ones, which leaves reinforcement learning something to do in minutes.
- The captions of the words held out are never seen.
"""

from collections.abc import Collection

import numpy as np
import torch
from denoiser import LessonBatch, encode_packed
from diffusers import AutoencoderKLQwenImage
from words import all_strings, caption, draw, misspell


def draw_batch(rng: np.random.Generator, size: int) -> list[np.ndarray]:
    """Drawings of random strings in random places, for the autoencoder."""
    strings = all_strings()
    return [draw(strings[i], rng) for i in rng.integers(len(strings), size=size)]


def draw_world(rng: np.random.Generator) -> list[np.ndarray]:
    """Enough drawings to tell what the latents of all are like."""
    return draw_batch(rng, 600)


def encode_world(vae: AutoencoderKLQwenImage) -> torch.Tensor:
    """Latents of a drawing of every string, fp32 [strings, 10, 64]."""
    return encode_packed(vae, np.stack([draw(string) for string in all_strings()]))


def lesson(latents: torch.Tensor, misspelling: float, held_out: Collection[str]) -> LessonBatch:
    """Batches of `encode_world`'s latents.

    Args:
        misspelling: probability with which a letter of a picture is not what the caption says.
        held_out: words that are never asked for.
    """
    strings = all_strings()
    index = {string: i for i, string in enumerate(strings)}
    askable = [string for string in strings if string not in held_out]

    def batch(rng: np.random.Generator, size: int) -> tuple[torch.Tensor, list[str]]:
        asked = [askable[i] for i in rng.integers(len(askable), size=size)]
        shown = [index[misspell(word, misspelling, rng)] for word in asked]
        return latents[shown], [caption(word) for word in asked]

    return batch
