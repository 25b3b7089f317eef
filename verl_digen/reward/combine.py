# SPDX-License-Identifier: Apache-2.0
"""Values of several rewards -> the reward of a sample (`digen.reward.combine`), and its formula for people."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_digen.config import RewardConfig, RewardEntry
from verl_digen.config.reward import COMBINED, VALIDATION
from verl_digen.errors import RunStopped
from verl_digen.require import refusing
from verl_digen.user_modules import load

Combination = Callable[[dict[str, float], dict[str, float]], float]
"""(reward -> value, reward -> weight) -> the reward of a sample. Both hold the rewards that scored the sample and
have a weight that is not 0."""

KEY = "digen.reward.combine"


def find_combination(config: RewardConfig) -> Combination | None:
    """The user's function; None for a weighted sum. ValueError if it cannot be called with two mappings, or loaded."""
    if config.combine in COMBINED:
        return None
    found: Any = load(config.combine, KEY, f"one of {', '.join(COMBINED)}, or package.module.function")
    rule = f"{KEY} must be a function of (values, weights)"
    with refusing(rule, found, "write def combine(values, weights) that returns a number"):
        if inspect.iscoroutinefunction(found):
            raise TypeError("it is async")
        inspect.signature(found).bind({}, {})
    return found


def combined(combination: Combination, values: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The reward of one sample by the user's function. `values`: reward -> value of those that scored the sample,
    details left out. RunStopped if the function raised, or returned no finite number."""
    trained = {name: weight for name, weight in weights.items() if weight != 0 and name in values}
    try:
        found = float(combination({name: values[name] for name in trained}, trained))
    except Exception as error:  # of the user's function
        raise RunStopped(f"{KEY} failed with {type(error).__name__}: {error} for {dict(values)}; repair it") from error
    if not math.isfinite(found):
        raise RunStopped(f"{KEY} must return a finite number, got {found} for {dict(values)}; repair it")
    return found


def formula(weights: Mapping[str, float], combine: str = "sum", entries: Sequence[RewardEntry] = ()) -> str:
    """Human-readable formula of what a run trains on. A reward that `entries` leaves out scores all samples.

    Example:
        formula({"custom": 1.0, "jpeg": 0.2, "ocr": 0.0})  # "reward = 1 x custom + 0.2 x jpeg (only logged: ocr)"
    """
    known = {entry.name: entry for entry in entries}
    labels = {name: _label(name, known.get(name)) for name in weights}
    trained = {labels[name]: weight for name, weight in weights.items() if weight != 0}
    watching = [name for name, weight in weights.items() if weight == 0]
    late = [name for name in watching if name in known and known[name].when == VALIDATION]
    logged = [labels[name] for name in watching if name not in late]
    groups = (("only logged", logged), ("only at validation", [labels[name] for name in late]))
    named = "; ".join(f"{what}: {', '.join(names)}" for what, names in groups if names)
    after = f" ({named})" if named else ""
    if combine == "sum":
        return f"reward = {' + '.join(f'{weight:g} x {name}' for name, weight in trained.items())}{after}"
    if combine == "gdpo":
        terms = " + ".join(f"{weight:g} x A({name})" for name, weight in trained.items())
        return f"advantage = {terms}, each reward normalised in its group{after}"
    return f"reward = {combine}({', '.join(trained)}){after}"


def _label(name: str, entry: RewardEntry | None) -> str:
    """The name, with what is special about the entry."""
    if entry is None:
        return name
    gold = " (gold)" if entry.is_gold else ""
    sources = f" [{', '.join(entry.data_sources)}]" if entry.data_sources is not None else ""
    return f"{name}{sources}{gold}"
