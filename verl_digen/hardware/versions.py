# SPDX-License-Identifier: Apache-2.0
"""Versions of dependencies: refused outside the range that can work, a warning beside what was tested.

Private names of these packages are used (`tests/contracts`), so another version may compute something else without an
error. `digen doctor` prints the same.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Supported:
    """Tested and possible versions of one package."""

    can_work: SpecifierSet
    """Others are refused."""
    tested: tuple[SpecifierSet, ...]
    """The first is the version that a remedy installs. A version in none of these ranges is warned of."""


SUPPORTED = {
    name: Supported(SpecifierSet(can_work), tuple(map(SpecifierSet, tested)))
    for name, can_work, *tested in (
        ("verl", ">=0.9.1,<0.10", "==0.9.1"),
        ("torch", ">=2.11,<2.16", "==2.13.0", "==2.15.0", "==2.14.0", "==2.12.0", "==2.11.0"),
        ("TransferQueue", ">=0.1.10,<0.2", "==0.1.11"),
        ("tensordict", ">=0.10,<0.11", "==0.10.0"),
        ("diffusers", ">=0.40,<0.43", "==0.40.0", "==0.42.1", "==0.41.0"),
        ("transformers", ">=5.9,<5.25", ">=5.10.4,<5.11", "==5.9.0", "==5.14.1", "==5.17.0", "==5.24.0"),
        ("peft", ">=0.18,<1", "==0.21.*"),
        ("ray", ">=2.41,<3", "==2.60.*"),
    )
}
"""Package -> what was tested with this version of verl-digen."""
ENGINE_PACKAGES = ("vllm", "vllm-omni")
ENGINE_TESTED = ("0.28.0", "0.30.0")
"""Versions, of both packages alike, that `rollout/vllm_omni` was tested with; setup.py pins the first."""


def installed(names: Iterable[str] = ("verl-digen", *SUPPORTED)) -> dict[str, str]:
    """Package -> installed version; by default of those that decide what a run computes."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def outside(found: Mapping[str, str], *, tested: bool) -> Iterator[tuple[str, str, SpecifierSet]]:
    """(package, its version, the range it is not in), of installed packages that cannot work, or with `tested` were not
    tested."""
    for name, number in found.items():
        supported = SUPPORTED[name]
        ranges = supported.tested if tested else (supported.can_work,)
        if not any(one.contains(number, prereleases=True) for one in ranges):  # +cpu of 2.13.0+cpu does not count
            yield name, number, ranges[0]


def is_engine_tested(found: Sequence[str | None]) -> bool:
    """True if these versions of `ENGINE_PACKAGES` were tested with each other."""
    return any(found.count(tested) == len(ENGINE_PACKAGES) for tested in ENGINE_TESTED)
