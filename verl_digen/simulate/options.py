# SPDX-License-Identifier: Apache-2.0
"""A rule that several options of `digen simulate` share."""

from __future__ import annotations

from argparse import Namespace

from verl_digen.require import require


def require_absent(args: Namespace, name: str, needed: str, remedy: str = "give that, too") -> None:
    """Raise ValueError if the option `name` is given; it says nothing without the option `needed`."""
    value = vars(args)[name]
    require(value is None, f"--{name.replace('_', '-')} must be left out without {needed}", value, remedy)
