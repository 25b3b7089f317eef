# SPDX-License-Identifier: Apache-2.0
"""Pictures, videos and distributions to W&B, through the module that verl's tracker has initialised.

Called in the driver before the step's metrics, because W&B drops what is logged for an earlier step. It reads the files
of the image log; pixels never come in a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl_digen.observe.images import Shown, video_path


def log_to_wandb(
    wandb: Any, step: int, pictures: Mapping[str, Sequence[Shown]], values: Mapping[str, Sequence[float]]
) -> None:
    """Log lists of pictures and histograms of `values`, by name, for optimizer step `step`; nothing if both are empty.

    Args:
        wandb: the module `wandb`, with a run.
    """
    data: dict[str, Any] = {
        name: [_media(wandb, entry) for entry in shown] for name, shown in pictures.items() if shown
    }
    data |= {name: wandb.Histogram(list(numbers)) for name, numbers in values.items()}
    if data:
        wandb.log(data=data, step=step)


def _media(wandb: Any, shown: Shown) -> Any:
    """A picture, or the video beside it, with reward and prompt as caption."""
    caption = f"{shown.reward:.3f}  {shown.prompt}"
    video = video_path(shown.path)
    if video.is_file():
        return wandb.Video(str(video), caption=caption, format="gif")
    return wandb.Image(str(shown.path), caption=caption)
