# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name, and what a reward function is.

A reward function takes keyword arguments as verl's do and returns a number, or a dict with `score` and details:

    def compute_score(data_source, solution_image, ground_truth, extra_info=None) -> float | dict: ...

`solution_image` is a numpy uint8 array [H, W, 3], or [F, H, W, 3] for a video: all its frames, as the VAE decoded them.
A function decides what it makes of them; the built-in ones score each frame and take the mean. `extra_info` holds the
row's own `extra_info` and the `prompt`. The function may be `async`. It may raise: the call is retried, then the sample
fails; there is no silent zero.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

RewardFunction = Callable[..., Any]

BUILT_IN: dict[str, str] = {
    "shapes": "verl_digen.reward.shapes.scorer:compute_score",
    "jpeg_compressibility": "verl_digen.reward.jpeg:compute_score",
}
"""Name -> "module:function"."""


def resolve(name: str) -> RewardFunction:
    """The reward function called `name`: a built-in one, or "package.module:function".

    Raises:
        ValueError: unknown name (lists the built-in ones), or a module without that function.
    """
    target = BUILT_IN.get(name, name)
    module_name, separator, function_name = target.partition(":")
    if not separator:
        raise ValueError(
            f"digen.reward.functions must name one of {', '.join(sorted(BUILT_IN))}, or package.module:function, "
            f"got {name!r}; a function in a file of your own goes to reward.custom_reward_function.path"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(
            f"digen.reward.functions: {name!r} could not be loaded ({error}); check the module's name and that it is "
            "installed"
        ) from error
    return function
