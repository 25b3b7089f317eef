# SPDX-License-Identifier: Apache-2.0
"""Reward functions: their calling convention, and how one becomes a `Reward`.

    def compute_score(data_source, solution_image, ground_truth, extra_info=None) -> float | dict: ...

A reward function takes verl's keyword arguments and returns a number, or a dict with `score` and details.
`solution_image` is a numpy uint8 array [H, W, 3], or [F, H, W, 3] for a video: all its frames, as the VAE decoded them.
`extra_info` holds the row's own `extra_info`, the `prompt`, the paths of its `images`, and the `audio`
(`verl_digen.inputs.audio.Audio`) of a video with sound. The function may be `async`. It may raise: the call is retried,
then the sample fails; there is no silent zero.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, ClassVar, cast

from verl_digen.errors import call_users
from verl_digen.reward.base import Result, Reward
from verl_digen.types import RewardInput

CUSTOM = "custom"
"""Name under which `reward.custom_reward_function` is weighted and logged."""

ARGUMENTS = ("data_source", "solution_image", "ground_truth", "extra_info")
"""Keyword arguments of every call."""

FORM = f"def compute_score({', '.join(ARGUMENTS)}=None)"
"""Definition to write, for messages."""


def call_arguments(sample: RewardInput) -> dict[str, Any]:
    """The keyword arguments of a function's call for a sample."""
    row = sample.row
    sound = {} if sample.audio is None else {"audio": deepcopy(sample.audio)}
    return {
        "data_source": row.data_source,
        "solution_image": sample.pixels.copy(),  # a function may write to what it is given
        "ground_truth": deepcopy(row.ground_truth),
        "extra_info": {**deepcopy(dict(row.extra)), "prompt": row.text, "images": list(row.images), **sound},
    }


class FunctionReward(Reward):
    """A function as a reward: it is called once per sample, at the same time for all of a batch, with its settings as
    further keyword arguments."""

    function: ClassVar[Callable[..., Any]]
    has_pool = False

    @classmethod
    def settings(cls, arguments: Mapping[str, Any], key: str) -> Mapping[str, Any]:
        """The arguments, if the function can be called with them."""
        require_reward_function(key, cls.function, arguments, "the entry's arguments")
        return arguments

    async def score(self, batch: Sequence[RewardInput]) -> Sequence[Result | Exception]:
        found = await asyncio.gather(*map(self._call, batch), return_exceptions=True)
        return [one if isinstance(one, Exception) else cast(Result, one) for one in found]

    async def _call(self, sample: RewardInput) -> Any:
        return await call_users(partial(self.function, **call_arguments(sample) | dict(self.config)))


def reward_of(function: Any) -> type[FunctionReward]:
    """The class of a function."""
    return type("FunctionReward", (FunctionReward,), {"function": staticmethod(function)})


def require_reward_function(
    key: str,
    function: Any,
    extra: Mapping[str, Any] | None = None,
    extra_place: str = "reward.custom_reward_function.reward_kwargs",
) -> None:
    """Raise ValueError unless `function` can be called as a reward function, with `ARGUMENTS` and the user's `extra`
    keyword arguments. Messages name the config key `key`, and `extra_place`, where the user gives `extra`."""
    makes_many = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
    is_function = callable(function) and not isinstance(function, type) and not makes_many
    if not is_function:
        raise ValueError(
            f"{key} must be a function that returns a number or a dict with 'score', got "
            f"{_describe(function)}; write {FORM}"
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
            f"{_remedy(signature, given, extra_place)}"
        ) from error


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return f"the generator {value.__name__}" if callable(value) else repr(value)


def _remedy(signature: inspect.Signature, given: Mapping[str, Any], extra_place: str) -> str:
    names = set(signature.parameters)
    if set(given) - set(ARGUMENTS) - names and names.issuperset(ARGUMENTS[:2]):
        return f"take the other names out of {extra_place}, or let the function take them"
    if "solution_str" in names:
        return "this is verl's form for text: rename solution_str to solution_image, a uint8 array [H, W, 3]"
    if {"images", "prompts"} & names:
        return (
            "this is flow_grpo's form: write a compute_score of these arguments that calls it with [solution_image], "
            "[extra_info['prompt']] and [extra_info]"
        )
    return f"write {FORM}, or let it take **kwargs"
