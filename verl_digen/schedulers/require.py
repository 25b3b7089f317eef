# SPDX-License-Identifier: Apache-2.0
"""The one form of an error about a value that a user gave: rule, value, remedy.

It lives here because the schedulers import nothing of the project but themselves, and everybody may import them.
"""

from __future__ import annotations


def require(holds: bool, rule: str, value: object, remedy: str) -> None:
    """Raise ValueError `rule, got value; remedy` unless `holds`. `rule` starts with the key as typed."""
    if not holds:
        raise ValueError(f"{rule}, got {value!r}; {remedy}")


def require_one_of(key: str, value: str, known: tuple[str, ...]) -> None:
    """Raise ValueError listing `known` unless `value` is one of them."""
    require(value in known, f"{key} must be one of {', '.join(known)}", value, "choose one of these")
