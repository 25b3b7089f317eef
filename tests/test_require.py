# SPDX-License-Identifier: Apache-2.0
"""Bounds of fields: what they let pass, and the words of the refusal."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from typing import Annotated, Literal

import pytest

from verl_digen.require import In, OneOf, check_fields, settings_of


@dataclass(frozen=True)
class Settings:
    size: Annotated[int, In("[1, inf]"), "2 is usual"] = 2
    share: Annotated[float | None, In("(0, 1]")] = None
    chunk: Annotated[int | str, In("[1, 8]", "auto")] = "auto"
    rate: Annotated[float, In("[0, inf)")] = 0.5
    shift: Annotated[float, In("(-inf, inf)")] = 0.0
    kind: Annotated[str, OneOf(("all", "first"))] = "all"
    free: int = -1

    def __post_init__(self) -> None:
        check_fields(self, "digen.x.")


@pytest.mark.parametrize(
    "good", [{}, {"size": 10**9}, {"share": 1.0}, {"chunk": 8}, {"rate": 0.0}, {"shift": -5.0}, {"kind": "first"}]
)
def test_values_within_their_bounds_pass(good):
    Settings(**good)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"size": 0}, "digen.x.size must be >= 1, got 0; 2 is usual"),
        ({"size": 2.5}, "digen.x.size must be >= 1, got 2.5; 2 is usual"),
        ({"size": True}, "digen.x.size must be >= 1, got True; 2 is usual"),
        ({"rate": None}, "digen.x.rate must be >= 0 and finite, got None; 0.5 is the default"),
        ({"share": 0.0}, "digen.x.share must be null or lie in (0, 1], got 0.0; null is the default"),
        ({"share": nan}, "digen.x.share must be null or lie in (0, 1], got nan; null is the default"),
        ({"chunk": 9}, "digen.x.chunk must be auto or lie in [1, 8], got 9; auto is the default"),
        ({"chunk": "all"}, "digen.x.chunk must be auto or lie in [1, 8], got 'all'; auto is the default"),
        ({"rate": inf}, "digen.x.rate must be >= 0 and finite, got inf; 0.5 is the default"),
        ({"shift": -inf}, "digen.x.shift must be finite, got -inf; 0.0 is the default"),
        ({"kind": "fist"}, "digen.x.kind must be one of all, first, got 'fist'; did you mean first? choose one of"),
    ],
)
def test_a_refusal_says_key_rule_value_and_remedy(bad, message):
    with pytest.raises(ValueError) as told:
        Settings(**bad)
    assert str(told.value).startswith(message)


@dataclass(frozen=True)
class Larger(Settings):
    size: int = 4


def test_a_field_with_another_default_keeps_its_bound():
    with pytest.raises(ValueError, match=r"digen.x.size must be >= 1, got 0; 2 is usual"):
        Larger(size=0)
    assert Larger().size == 4


@dataclass(frozen=True)
class Chosen:
    kind: Literal["all", "first"] = "all"


@dataclass(frozen=True)
class Ruled:
    size: int = 1

    def __post_init__(self) -> None:
        assert self.size > 1, "size must be > 1"


class Undecorated(Settings):
    more: int = 1


@pytest.mark.parametrize(
    ("config_class", "message"),
    [
        (Chosen, "key: fields of Chosen must have types that OmegaConf knows, got kind (Unexpected type"),
        (Ruled, "key: size must be > 1"),
        (Undecorated, "key: settings of owner must be a dataclass, got"),
    ],
)
def test_a_class_of_settings_that_cannot_be_made_is_refused_under_its_key(config_class, message):
    with pytest.raises(ValueError) as told:
        settings_of("owner", config_class, {}, "key")
    assert str(told.value).startswith(message)
