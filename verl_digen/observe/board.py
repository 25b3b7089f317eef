# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos, tables and distributions to TensorBoard.

Pictures are sent as the files they are: PNG is shown, GIF is played.

Invariant (tests/observe/test_images.py): what TensorBoard reads is the file, byte for byte.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tensorboard.compat.proto import summary_pb2
from torch.utils.tensorboard import SummaryWriter

RGB_CHANNELS = 3


def log_pictures(folder: Path, step: int, pictures: Mapping[str, Path]) -> None:
    """Write the files `pictures`, by tag, for optimizer step `step`.

    Args:
        folder: folder of event files that no other process writes to: TensorBoard follows only the newest file of one.
    """
    summary_types: Any = summary_pb2  # created at import
    Summary = summary_types.Summary
    values = []
    for tag, path in pictures.items():
        with Image.open(path) as image:
            width, height = image.size
        picture = Summary.Image(
            width=width, height=height, colorspace=RGB_CHANNELS, encoded_image_string=path.read_bytes()
        )
        values.append(Summary.Value(tag=tag, image=picture))
    with SummaryWriter(str(folder)) as writer:
        writer._get_file_writer().add_summary(Summary(value=values), step)


def log_table(folder: Path, step: int, tag: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table as text, which TensorBoard shows as one. `folder` as in `log_pictures`."""
    lines = [head, ["---"] * len(head), *rows]
    with SummaryWriter(str(folder)) as writer:
        writer.add_text(tag, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)


def _cell(text: str) -> str:
    """Text for a cell of a Markdown table, in one line and without markup."""
    for sign in ("\\", "|", "<", "*", "_", "`", "[", "#"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def log_histograms(folder: Path, step: int, values: Mapping[str, Sequence[float]]) -> None:
    """Write the distributions of `values`, by tag, for optimizer step `step`. `folder` as in `log_pictures`."""
    with SummaryWriter(str(folder)) as writer:
        for tag, numbers in values.items():
            writer.add_histogram(tag, np.array(numbers), step)
