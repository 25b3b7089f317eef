# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name, their calling convention, and their weighted sum.

A reward function takes verl's keyword arguments and returns a number, or a dict with `score` and details:

    def compute_score(data_source, solution_image, ground_truth, extra_info=None) -> float | dict: ...

`solution_image` is a numpy uint8 array [H, W, 3], or [F, H, W, 3] for a video: all its frames, as the VAE decoded them.
The built-in functions score each frame and take the mean; others may do as they like. `extra_info` holds the row's own
`extra_info` and the `prompt`. The function may be `async`. It may raise: the call is retried, then the sample fails;
there is no silent zero.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

RewardFunction = Callable[..., Any]

BUILT_IN: dict[str, str] = {
    "shapes": "verl_digen.reward.shapes.scorer:compute_score",
    "jpeg_compressibility": "verl_digen.reward.jpeg:compute_score",
}
"""Name -> "module:function"."""

CUSTOM = "custom"
"""Name under which `reward.custom_reward_function` is weighted and logged."""

ARGUMENTS = ("data_source", "solution_image", "ground_truth", "extra_info")
"""Keyword arguments of every call."""


def resolve(name: str) -> RewardFunction:
    """The reward function called `name`: a built-in one, "package.module:function" or "package.module.function".

    Hydra accepts the form without a colon on the command line without quotes.

    Raises:
        ValueError: unknown name (lists the built-in ones), a module that cannot be imported or lacks that function, or
            an object that cannot be called as a reward function.
    """
    target = BUILT_IN.get(name, name)
    separator = ":" if ":" in target else "."
    module_name, _, function_name = target.rpartition(separator)
    if not module_name or not function_name:
        raise ValueError(
            f"digen.reward.functions must name one of {', '.join(sorted(BUILT_IN))}, or package.module.function, "
            f"got {name!r}; a function in a file of your own goes to reward.custom_reward_function.path"
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything at import
        raise ValueError(
            f"digen.reward.functions: {name!r} could not be loaded ({type(error).__name__}: {error}); check the "
            "module's name and that it is installed"
        ) from error
    require_reward_function(f"digen.reward.functions: {name!r}", function)
    return function


def require_reward_function(key: str, function: Any, extra: Mapping[str, Any] | None = None) -> None:
    """Raise ValueError unless `function` can be called as a reward function.

    Args:
        key: config key that named it, for the message.
        extra: keyword arguments that the user passes in addition to `ARGUMENTS`.
    """
    is_function = callable(function) and not isinstance(function, type) and not inspect.isgeneratorfunction(function)
    if not is_function:
        raise ValueError(
            f"{key} must be a function that returns a number or a dict with 'score', got "
            f"{_describe(function)}; write def compute_score({', '.join(ARGUMENTS)}=None)"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function without a signature
        return
    given = dict.fromkeys(ARGUMENTS) | dict(extra or {})
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(
            f"{key} must take the keyword arguments {', '.join(given)}, got a function of {signature} ({error}); "
            f"{_remedy(signature, given)}"
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"the generator {value.__name__}" if callable(value) else repr(value)


def _remedy(signature: inspect.Signature, given: Mapping[str, Any]) -> str:
    names = set(signature.parameters)
    if set(given) - set(ARGUMENTS) - names and names.issuperset(ARGUMENTS[:2]):
        return "take the other names out of reward.custom_reward_function.reward_kwargs, or let the function take them"
    if "solution_str" in names:
        return "this is verl's form for text: rename solution_str to solution_image, a uint8 array [H, W, 3]"
    if {"images", "prompts"} & names:
        return (
            "this is flow_grpo's form: write a compute_score of these arguments that calls it with [solution_image], "
            "[extra_info['prompt']] and [extra_info]"
        )
    return f"write def compute_score({', '.join(ARGUMENTS)}=None), or let it take **kwargs"


def formula(weights: Mapping[str, float]) -> str:
    """Human-readable formula of the reward.

    Example:
        formula({"custom": 1.0, "jpeg": 0.2, "ocr": 0.0})  # "reward = 1 x custom + 0.2 x jpeg (only logged: ocr)"
    """
    terms = [f"{weight:g} x {name}" for name, weight in weights.items() if weight != 0]
    logged = [name for name, weight in weights.items() if weight == 0]
    return f"reward = {' + '.join(terms)}" + (f" (only logged: {', '.join(logged)})" if logged else "")
