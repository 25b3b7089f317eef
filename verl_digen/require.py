# SPDX-License-Identifier: Apache-2.0
"""The one form of an error about a value that a user gave: rule, value, remedy.

It lives here because the schedulers import nothing of the project but themselves, and every folder may import them.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Raise ValueError `rule, got value; remedy` unless `holds`. `rule` starts with the key as typed."""
    if not holds:
        raise ValueError(f"{rule}, got {value!r}; {remedy}")


def require_one_of(key: str, value: object, known: Iterable[str]) -> None:
    """Raise ValueError listing `known` unless `value` is one of them; says which one was probably meant."""
    names = tuple(known)
    hint = suggestion(str(value), names)
    require(value in names, f"{key} must be one of {', '.join(names)}", value, f"{hint}choose one of these")


def require_fsdp2(strategy: str) -> None:
    """Raise ValueError unless verl is to shard the weights with FSDP2, the one way that the engine has."""
    require(
        strategy == "fsdp2",
        "actor_rollout_ref.actor.strategy must be fsdp2 for diffusion models",
        strategy,
        "set it to fsdp2",
    )


def suggestion(given: str, known: Iterable[str]) -> str:
    """`did you mean NAME? ` for the known name closest to `given`, or nothing where none is close.

    Example:
        suggestion("tensorbord", ("wandb", "tensorboard"))  # "did you mean tensorboard? "
    """
    close = get_close_matches(given, tuple(known), n=1)
    return f"did you mean {close[0]}? " if close else ""
