# SPDX-License-Identifier: Apache-2.0
"""The wheel and the sdist, built from a copy of the checkout."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_PACKAGED = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "tests", "examples"
)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Names in the wheel and in the sdist."""
    folder = tmp_path_factory.mktemp("built")
    source = folder / "source"
    shutil.copytree(ROOT, source, symlinks=True, ignore=NOT_PACKAGED)
    for build in ("build_wheel", "build_sdist"):
        code = f"import setuptools.build_meta as backend; backend.{build}({str(folder)!r})"
        subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        wheel_names = archive.namelist()
    with tarfile.open(sdist) as archive:
        sdist_names = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    return wheel_names, sdist_names


def test_wheel_installs_nothing_at_top_level_but_the_package(built):
    wheel, _ = built
    top_level = {name.partition("/")[0] for name in wheel}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"verl_digen"}


def test_wheel_and_sdist_hold_every_recipe_and_the_marker_for_type_checkers(built):
    wheel, sdist = built
    recipes = [path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml")]
    assert len(recipes) >= 4
    assert {f"verl_digen/{name}" for name in recipes} <= set(wheel)
    assert set(recipes) <= set(sdist)
    assert {"verl_digen/py.typed", "verl_digen/patches/__init__.py", "verl_digen/recipes/__init__.py"} <= set(wheel)


def test_wheel_holds_the_profiles_and_the_published_configs(built):
    wheel, _ = built
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "verl_digen").rglob("*.json")}
    assert len(data) >= 6 and data <= set(wheel)


def test_wheel_holds_every_module_once(built):
    wheel, _ = built
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "verl_digen").rglob("*.py")}
    assert {name for name in wheel if name.endswith(".py")} >= modules
    assert len(wheel) == len(set(wheel))


@pytest.mark.parametrize("name", ["recipes", "patches"])
def test_checkout_links_are_relative(name):
    link = ROOT / "verl_digen" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
