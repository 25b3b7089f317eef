# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos, tables and distributions to TensorBoard and W&B.

W&B gets pictures through the module that verl's tracker has initialised, in the driver before the step's metrics,
because W&B drops what is logged for an earlier step.

Invariant (tests/observe/test_images.py): what TensorBoard reads is the file, byte for byte.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto import summary_pb2
from torch.utils.tensorboard import SummaryWriter

from verl_digen.observe.images import Shown
from verl_digen.observe.run_files import video_path

RGB_CHANNELS = 3


def log_to_tensorboard(
    folder: Path,
    step: int,
    pictures: Mapping[str, Path],
    values: Mapping[str, Sequence[float]],
    tables: Mapping[str, Sequence[Sequence[str]]],
) -> None:
    """Write, by tag, the files `pictures` (PNG is shown, GIF is played), the distributions of `values`, and `tables`,
    the head first, as text, for optimizer step `step`. No other process may write event files to `folder`, because
    TensorBoard follows only the newest file of one."""
    Summary: Any = vars(summary_pb2)["Summary"]  # created at import
    with SummaryWriter(str(folder)) as writer:
        for tag, path in pictures.items():
            with Image.open(path) as image:
                width, height = image.size
            picture = Summary.Image(
                width=width, height=height, colorspace=RGB_CHANNELS, encoded_image_string=path.read_bytes()
            )
            writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=picture)]), step)
        for tag, numbers in values.items():
            writer.add_histogram(tag, np.array(numbers), step)
        for tag, (head, *rows) in tables.items():
            lines = [head, ["---"] * len(head), *rows]
            writer.add_text(tag, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table, in one line and without markup."""
    for sign in ("\\", "|", "<", "*", "_", "`", "[", "#"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def log_to_wandb(
    wandb: Any, step: int, pictures: Mapping[str, Sequence[Shown]], values: Mapping[str, Sequence[float]]
) -> None:
    """Log lists of pictures, each also as a table NAME_table, and histograms of `values`, by name, for optimizer step
    `step`, with the module `wandb` of a run; nothing if both are empty."""
    # in float32: numpy has no bins between values that are equal but for the last bits of a float64
    rounded = {name: np.array(numbers, np.float32).tolist() for name, numbers in values.items()}
    data: dict[str, Any] = {name: wandb.Histogram(numbers) for name, numbers in rounded.items()}
    for name, shown in pictures.items():
        if shown:
            # of a video the filmstrip: a column of W&B's has one kind of media
            rows = [[step, entry.prompt, entry.reward, wandb.Image(str(entry.path))] for entry in shown]
            data[name] = [_media(wandb, entry) for entry in shown]
            data[f"{name}_table"] = wandb.Table(columns=["step", "prompt", "reward", "picture"], data=rows)
    if data:
        wandb.log(data=data, step=step)


def _media(wandb: Any, shown: Shown) -> Any:
    """A picture, or the video beside it, with reward and prompt as caption."""
    caption = shown.caption(3)
    video = video_path(shown.path)
    if video.is_file():
        return wandb.Video(str(video), caption=caption, format="gif")
    return wandb.Image(str(shown.path), caption=caption)
