# SPDX-License-Identifier: Apache-2.0
"""The sdist of a tagged checkout, and the wheel that is built from it: files, and metadata as an index reads them."""

import re
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import verl_digen
from tests.packaging.building import (
    ROOT,
    WITH_SAMPLES,
    build,
    commit,
    copy_checkout,
    git,
    metadata_from,
    metadata_of,
    unpacked,
    version_of,
)
from verl_digen.cli import main
from verl_digen.hardware.versions import installed

RELEASE = "7.8.9"
LINK = re.compile(r"\]\(([^)]+)\)")
HOME = "https://github.com/OWNER/verl-digen"

OF_SDIST = {
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"),
    *("patches", "recipes", "verl_digen", "verl_digen.egg-info"),
}
"""Names at the top of an sdist."""
MADE_BY_A_BUILD = {"PKG-INFO", "setup.cfg", "verl_digen.egg-info"}


@dataclass(frozen=True)
class Built:
    """Files of a release."""

    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The files of release 7.8.9; the wheel is made of the unpacked sdist, which has no git."""
    folder = tmp_path_factory.mktemp("built")
    source = copy_checkout(folder / "source")
    commit(source, f"v{RELEASE}")
    out = folder / "dist"
    out.mkdir()
    sdist = build("sdist", source, out)
    return Built(sdist, build("wheel", unpacked(sdist, folder / "unpacked"), out))


@pytest.fixture(scope="module")
def wheel(built: Built) -> list[str]:
    """Names in the wheel."""
    with ZipFile(built.wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def sdist(built: Built) -> list[str]:
    """Names in the sdist, below its folder."""
    with tarfile.open(built.sdist) as archive:
        return [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]


def test_wheel_installs_nothing_at_top_level_but_the_package(wheel):
    top_level = {name.partition("/")[0] for name in wheel}
    assert top_level == {"verl_digen", f"verl_digen-{RELEASE}.dist-info"}


def test_sdist_holds_what_builds_the_package_and_nothing_else(sdist):
    assert {name.partition("/")[0] for name in sdist} == OF_SDIST
    assert not [name for name in sdist if name.endswith("sample.py")], f"a file of {WITH_SAMPLES}"


def test_wheel_and_sdist_hold_every_recipe_and_the_marker_for_type_checkers(wheel, sdist):
    recipes = [path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml")]
    assert len(recipes) >= 4
    assert {f"verl_digen/{name}" for name in recipes} <= set(wheel)
    assert set(recipes) <= set(sdist)
    assert {"verl_digen/py.typed", "verl_digen/patches/__init__.py", "verl_digen/recipes/__init__.py"} <= set(wheel)


def test_every_file_of_the_package_in_git_is_in_the_wheel(wheel):
    """A kind of file that `package_data` does not name would be missing after an installation."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    tracked = git(ROOT, "ls-files", "verl_digen", "recipes", "patches").split()
    files = {name if name.startswith("verl_digen/") else f"verl_digen/{name}" for name in tracked}
    links = {"verl_digen/recipes", "verl_digen/patches"}
    assert {name for name in files - links if (ROOT / name).exists()} <= set(wheel)


@pytest.mark.parametrize("name", ["recipes", "patches"])
def test_checkout_links_are_relative(name):
    link = ROOT / "verl_digen" / name
    assert link.is_symlink()
    assert link.readlink().as_posix() == f"../{name}"


def test_the_version_of_a_tagged_commit_is_the_tag(built: Built):
    assert built.sdist.name == f"verl_digen-{RELEASE}.tar.gz"
    assert built.wheel.name == f"verl_digen-{RELEASE}-py3-none-any.whl"
    assert metadata_of(built.wheel)["Version"] == RELEASE


def test_an_index_accepts_both_files(built: Built):
    """twine renders the description, too; a warning counts."""
    command = [sys.executable, "-m", "twine", "check", "--strict", built.sdist, built.wheel]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stdout.count("PASSED") == 2, checked.stdout + checked.stderr


def test_metadata_name_licence_python_audience_and_extras(built: Built):
    found = metadata_of(built.wheel)
    assert found["License-Expression"] == "Apache-2.0" and found["License-File"] == "LICENSE"
    assert SpecifierSet(found["Requires-Python"]) == SpecifierSet(">=3.10,<3.13")
    assert {"rewards", "vllm-omni", "docs", "dev"} == set(found.get_all("Provides-Extra", []))
    classifiers = found.get_all("Classifier", [])
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12)} <= set(classifiers)
    assert not [name for name in classifiers if name.startswith("License ::")], "they contradict License-Expression"
    needed = {Requirement(line).name for line in found.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert {"verl", "torch", "diffusers", "ray"} <= needed and "pytest" not in needed


def test_addresses_are_public_ones(built: Built):
    found = metadata_of(built.wheel)
    addresses = [line.partition(", ")[2] for line in found.get_all("Project-URL", [])]
    assert addresses and all(one.startswith("https://github.com/") for one in addresses)


def test_no_link_of_the_description_leads_nowhere(built: Built):
    """Without an address of the repository, links to its files are words, and pictures are left out."""
    text = metadata_of(built.wheel).get_payload()
    assert isinstance(text, str) and text.startswith("# verl-digen")
    assert [link for link in LINK.findall(text) if not link.startswith("https://")] == []
    assert "docs/images" not in text and "[Quick start]" not in text and "\nQuick start " in text


def test_with_an_address_links_and_pictures_lead_to_the_repository(tmp_path: Path):
    for package in ("verl_digen", "recipes", "patches"):
        (tmp_path / package).mkdir()
    for name in ("README.md", "LICENSE", "pyproject.toml"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    script = (ROOT / "setup.py").read_text()
    assert script.count("HOME: str | None = None\n") == 1
    (tmp_path / "setup.py").write_text(script.replace("HOME: str | None = None\n", f"HOME: str | None = {HOME!r}\n"))
    found = metadata_from(tmp_path)
    text = found.get_payload()
    links = [link for link in LINK.findall(text) if "volcengine" not in link]
    assert len(links) > 20 and all(link.startswith((f"{HOME}/blob/HEAD/", f"{HOME}/raw/HEAD/")) for link in links)
    paths = [re.sub(r"^.*?/HEAD/|#.*", "", link) for link in links]
    assert not [path for path in paths if not (ROOT / path).exists()]
    assert f"]({HOME}/raw/HEAD/docs/images/quickstart.png)" in text and f"]({HOME}/blob/HEAD/LICENSE" not in text
    assert f"Changelog, {HOME}/blob/HEAD/CHANGELOG.md" in found.get_all("Project-URL", [])


# -- the version: where it comes from, and who names it ------------------------------------------------------
@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Files that make the version, in a folder that is no repository yet."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("pyproject.toml", ".git_archival.txt", ".gitattributes"):
        (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


def test_versions_grow_from_no_git_over_commits_and_tags_to_commits_after_them(checkout: Path):
    """A tag that is no version changes nothing."""
    found = [version_of(checkout)]
    for tags in ([], ["v0.1.0"], ["measured-on-h100"]):
        commit(checkout, *tags)
        found.append(version_of(checkout))
    assert [Version(one).public for one in found] == ["0.1.dev0", "0.1.dev1", "0.1.0", "0.1.1.dev1"]
    assert sorted(found, key=Version) == found
    assert Version(found[1]).local is not None, "which no index accepts"


def test_an_archive_of_git_knows_its_version(checkout: Path, tmp_path: Path):
    commit(checkout, "v0.2.0")
    git(checkout, "archive", "--output", str(tmp_path / "all.tar"), "HEAD")
    with tarfile.open(tmp_path / "all.tar") as archive:
        archive.extractall(tmp_path / "archive", filter="data")
    assert version_of(tmp_path / "archive") == "0.2.0"


def test_the_package_the_command_and_a_runs_files_name_one_version(capsys):
    number = version("verl-digen")
    assert verl_digen.__version__ == number == installed()["verl-digen"]
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"verl-digen {number}\n"
    with pytest.raises(AttributeError, match="no attribute 'version'"):
        _ = verl_digen.version  # type: ignore[attr-defined]
