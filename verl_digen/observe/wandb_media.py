# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos, tables and distributions to W&B, through the module that verl's tracker has initialised.

Called in the driver before the step's metrics, because W&B drops what is logged for an earlier step. It reads the files
of the image log; pixels never come in a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_digen.observe.images import Shown
from verl_digen.observe.run_files import video_path


def log_to_wandb(
    wandb: Any, step: int, pictures: Mapping[str, Sequence[Shown]], values: Mapping[str, Sequence[float]]
) -> None:
    """Log lists of pictures, each also as a table NAME_table, and histograms of `values`, by name, for optimizer step
    `step`; nothing if both are empty.

    Args:
        wandb: the module `wandb`, with a run.
    """
    data: dict[str, Any] = {
        name: [_media(wandb, entry) for entry in shown] for name, shown in pictures.items() if shown
    }
    data |= {f"{name}_table": table(wandb, shown, step) for name, shown in pictures.items() if shown}
    data |= {name: wandb.Histogram(list(numbers)) for name, numbers in values.items()}
    if data:
        wandb.log(data=data, step=step)


def table(wandb: Any, shown: Sequence[Shown], step: int) -> Any:
    """A table with a row per picture: step, prompt, reward and the picture, of a video its filmstrip: a column of W&B's
    has one kind of media."""
    rows = [[step, entry.prompt, entry.reward, wandb.Image(str(entry.path))] for entry in shown]
    return wandb.Table(columns=["step", "prompt", "reward", "picture"], data=rows)


def _media(wandb: Any, shown: Shown) -> Any:
    """A picture, or the video beside it, with reward and prompt as caption."""
    caption = shown.caption(3)
    video = video_path(shown.path)
    if video.is_file():
        return wandb.Video(str(video), caption=caption, format="gif")
    return wandb.Image(str(shown.path), caption=caption)
