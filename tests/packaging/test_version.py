# SPDX-License-Identifier: Apache-2.0
"""The version: where it comes from, and who names it."""

import tarfile
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.version import Version

import verl_digen
from tests.packaging.building import ROOT, commit, git, version_of
from verl_digen.cli import main
from verl_digen.versions import installed


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
