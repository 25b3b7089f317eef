# SPDX-License-Identifier: Apache-2.0
"""Versions of what we stand on: refused outside the range that can work, a warning beside what was tested.

Private names of these packages are used (`tests/contracts`), so another version may compute something else without an
error. `digen doctor` prints the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Supported:
    """Tested and possible versions of one package."""

    can_work: SpecifierSet
    """Others are refused."""
    tested: SpecifierSet
    """Others are warned of."""


SUPPORTED = {
    name: Supported(SpecifierSet(can_work), SpecifierSet(tested))
    for name, can_work, tested in (
        ("verl", ">=0.9.1,<0.10", "==0.9.1"),
        ("torch", ">=2.13,<2.14", "==2.13.0"),
        ("TransferQueue", ">=0.1.10,<0.2", "==0.1.11"),
        ("tensordict", ">=0.10,<0.11", "==0.10.0"),
        ("diffusers", ">=0.40,<0.41", "==0.40.0"),
        ("transformers", ">=5.10,<5.11", ">=5.10.4,<5.11"),
        ("peft", ">=0.18,<1", "==0.21.*"),
        ("ray", ">=2.41,<3", "==2.60.*"),
    )
}
"""Package -> what was tested with this version of verl-digen."""


def installed() -> dict[str, str]:
    """Package -> installed version, of those that decide what a run computes."""
    found = {}
    for name in ("verl-digen", *SUPPORTED):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def outside(found: Mapping[str, str], *, tested: bool) -> Iterator[tuple[str, str, SpecifierSet]]:
    """(package, its version, the range it is not in), of what cannot work or of what was not tested.

    Args:
        found: package -> installed version; those that are not there are left out.
    """
    for name, number in found.items():
        wanted = SUPPORTED[name].tested if tested else SUPPORTED[name].can_work
        if not wanted.contains(number, prereleases=True):  # a local part, as in 2.13.0+cpu, does not count
            yield name, number, wanted
