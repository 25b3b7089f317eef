# SPDX-License-Identifier: Apache-2.0
"""Lessons in drawing shapes: pictures and captions of the world of `examples/drawn_world`.

- In a lesson with disobedience, the pictures are true to their captions only in part: shape, colour and
  position are drawn at random with that probability. After such a lesson the model still draws recognisable
  things, but often the wrong ones, which leaves reinforcement learning something to do in minutes.
- The first lesson is without: captions that tell little teach little, and drawing is learnt far more slowly.
"""

from dataclasses import replace

import numpy as np
import torch
from denoiser import LessonBatch, encode_packed
from diffusers import AutoencoderKLQwenImage
from drawn_scenes import ANCHORS, COLOURS, SHAPES, Scene, all_scenes, caption, draw

PICTURE_PX = 64

PICTURES_PER_SCENE = 16


def draw_batch(rng: np.random.Generator, size: int) -> list[np.ndarray]:
    """Drawings of random scenes."""
    scenes = all_scenes()
    return [draw(scenes[i], PICTURE_PX, rng) for i in rng.integers(len(scenes), size=size)]


def draw_world(rng: np.random.Generator) -> list[np.ndarray]:
    """A drawing of every scene."""
    return [draw(scene, PICTURE_PX, rng) for scene in all_scenes()]


def encode_world(vae: AutoencoderKLQwenImage, seed: int) -> torch.Tensor:
    """Latents of some drawings of every scene, fp32 [scenes, pictures, 16, 64]."""
    rng = np.random.default_rng(seed)
    pictures = ([draw(scene, PICTURE_PX, rng) for _ in range(PICTURES_PER_SCENE)] for scene in all_scenes())
    return torch.stack([encode_packed(vae, np.stack(of_scene)) for of_scene in pictures])


def lesson(latents: torch.Tensor, disobedience: float) -> LessonBatch:
    """Batches of `encode_world`'s latents.

    Args:
        disobedience: probability with which an attribute of a picture is not what its caption says.
    """
    scenes = all_scenes()
    index = {scene: i for i, scene in enumerate(scenes)}
    captions = [caption(scene) for scene in scenes]

    def batch(rng: np.random.Generator, size: int) -> tuple[torch.Tensor, list[str]]:
        asked = rng.integers(len(scenes), size=size)
        shown = [index[disobey(scenes[i], disobedience, rng)] for i in asked]
        return latents[shown, rng.integers(PICTURES_PER_SCENE, size=size)], [captions[i] for i in asked]

    return batch


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
