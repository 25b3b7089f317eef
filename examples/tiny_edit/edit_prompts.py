# SPDX-License-Identifier: Apache-2.0
"""Prompts of the tiny edit model: instructions, and the pictures that they are about, in a parquet file."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from drawn_edits import edits_of, instruction
from drawn_scenes import caption
from edit_lessons import Task, picture, single_scenes
from PIL import Image

NUM_PROMPTS = {"train": 352, "val": 48}
FIRST_DRAWING = 1000
"""Seed of the first prompt's drawing: pretraining has drawn none of them."""
IMAGES = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
"""Type of the column of pictures, the hub's."""


def split_tasks(seed: int) -> dict[str, list[Task]]:
    """Tasks of "train" and "val", no two of the same scene, each attribute in turn."""
    rng = np.random.default_rng(seed)
    scenes = single_scenes()
    attributes = ("colour", "shape", "position", "background")
    tasks: list[Task] = []
    for number, place in enumerate(rng.permutation(len(scenes))[: sum(NUM_PROMPTS.values())]):
        possible = [edit for edit in edits_of(scenes[place]) if edit.attribute == attributes[number % 4]]
        tasks.append(Task(scenes[place], FIRST_DRAWING + number, possible[rng.integers(len(possible))]))
    return {"val": tasks[: NUM_PROMPTS["val"]], "train": tasks[NUM_PROMPTS["val"] :]}


def write_prompts(folder: Path, tasks: dict[str, list[Task]]) -> None:
    """One row a task: the instruction, its picture, and what the reward `shape_edit` needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_split in tasks.items():
        table = pa.table(
            {
                "prompt": [instruction(task.edit) for task in of_split],
                "images": pa.array([[{"bytes": _png(task), "path": None}] for task in of_split], IMAGES),
                "data_source": ["tiny_edit"] * len(of_split),
                "ground_truth": [
                    {"target": caption(task.target()), "changed": task.edit.attribute} for task in of_split
                ],
            }
        )
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=100)


def _png(task: Task) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(picture(task.scene, task.drawing)).save(buffer, format="PNG")
    return buffer.getvalue()
