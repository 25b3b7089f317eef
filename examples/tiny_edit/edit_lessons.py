# SPDX-License-Identifier: Apache-2.0
"""Lessons in editing: a picture of one shape, an instruction, and the picture that it asks for.

- The two pictures of a lesson are drawn alike: the shape keeps its size and its offset from its place.
- In a lesson with disobedience the edited picture is true to the instruction, and to its source, only in part
  (`shapes.disobey`).
- The text encoder is frozen, so each prompt is encoded once.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from denoiser import Batch, encode_packed
from diffusers import AutoencoderKLQwenImage
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE, calculate_dimensions
from drawn_edits import Edit, apply, edits_of, instruction
from drawn_scenes import Scene, all_scenes, draw
from PIL import Image
from shapes import PICTURE_PX, disobey
from torch.nn.utils.rnn import pad_sequence

DRAWINGS = 3
"""Drawings of every scene, one per seed of `draw`: scenes of one seed are drawn alike."""


@dataclass(frozen=True)
class Task:
    """A drawing and an edit of it."""

    scene: Scene
    drawing: int
    """Seed of the drawing."""
    edit: Edit

    def target(self) -> Scene:
        """The scene that is asked for."""
        return apply(self.scene, self.edit)


def picture(scene: Scene, drawing: int) -> np.ndarray:
    """A drawing of a scene, uint8 [64, 64, 3]."""
    return draw(scene, PICTURE_PX, np.random.default_rng(drawing))


def single_scenes() -> list[Scene]:
    """Scenes with one shape, in a fixed order."""
    return [scene for scene in all_scenes() if scene.count == 1]


def draw_tasks(rng: np.random.Generator, edits_per_picture: int) -> list[Task]:
    """Tasks from every drawing of every scene, each with edits of different attributes."""
    tasks = []
    for scene in single_scenes():
        edits = edits_of(scene)
        for drawing in range(DRAWINGS):
            attributes = rng.permutation(sorted({edit.attribute for edit in edits}))[:edits_per_picture]
            for attribute in attributes:
                possible = [edit for edit in edits if edit.attribute == attribute]
                tasks.append(Task(scene, drawing, possible[rng.integers(len(possible))]))
    return tasks


class Album:
    """Latents of every drawing of every scene with one shape."""

    def __init__(self, vae: AutoencoderKLQwenImage):
        scenes = single_scenes()
        self._places = {scene: number for number, scene in enumerate(scenes)}
        drawn = ([picture(scene, drawing) for drawing in range(DRAWINGS)] for scene in scenes)
        self._latents = torch.stack([encode_packed(vae, np.stack(of_scene)) for of_scene in drawn])

    def __call__(self, scenes: list[Scene], drawings: list[int]) -> torch.Tensor:
        """Packed latents [B, tokens, 64]."""
        return self._latents[[self._places[scene] for scene in scenes], drawings]


@torch.no_grad()
def encode_tasks(pipeline: Any, tasks: list[Task]) -> list[torch.Tensor]:
    """Embeddings [L, D] of each task's instruction and picture, which is scaled as the pipeline does."""
    found = []
    for task in tasks:
        image = pipeline.image_processor.resize(
            Image.fromarray(picture(task.scene, task.drawing)), *calculate_dimensions(CONDITION_IMAGE_SIZE, 1.0)
        )
        embeds, _ = pipeline.encode_prompt([instruction(task.edit)], image=[image], device=torch.device("cpu"))
        found.append(embeds[0])
    return found


def joined(embeds: list[torch.Tensor], x0: torch.Tensor, source: torch.Tensor) -> Batch:
    """A batch of prompts, the pictures that are learnt and those that they come from."""
    mask = pad_sequence([torch.ones(len(one), dtype=torch.long) for one in embeds], batch_first=True)
    return Batch(x0, pad_sequence(embeds, batch_first=True), mask, source)


def lesson(album: Album, tasks: list[Task], embeds: list[torch.Tensor], disobedience: float) -> Any:
    """Batches of random tasks, for `denoiser.fit`.

    Args:
        disobedience: probability with which shape, colour and position are each drawn at random.
    """

    def batch(rng: np.random.Generator, size: int) -> Batch:
        chosen = rng.integers(len(tasks), size=size)
        asked = [tasks[number] for number in chosen]
        shown = [disobey(task.target(), disobedience, rng) for task in asked]
        drawings = [task.drawing for task in asked]
        sources = album([task.scene for task in asked], drawings)
        return joined([embeds[number] for number in chosen], album(shown, drawings), sources)

    return batch
