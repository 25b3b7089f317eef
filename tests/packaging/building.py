# SPDX-License-Identifier: Apache-2.0
"""Copies of the checkout, tagged or without git, and what is built from them."""

import os
import shutil
import subprocess
import sys
import tarfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = shutil.ignore_patterns(
    *(".git", ".venv*", "__pycache__", "*.egg-info", "build", "dist", "outputs", "shared", "*.png")
)
WITH_SAMPLES = ("tests", "examples", "docs", ".ci")
"""Folders that no package may hold; a copy has one file of each."""


def copy_checkout(target: Path) -> Path:
    """Copy what a build may read; returns `target`."""

    def ignored(folder: str, names: list[str]) -> set[str]:
        here = set(WITH_SAMPLES) & set(names) if Path(folder) == ROOT else set()
        return LEFT_OUT(folder, names) | here

    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
    for name in WITH_SAMPLES:
        (target / name).mkdir()
        (target / name / "sample.py").write_text("")
    return target


def git(folder: Path, *words: str) -> str:
    """Output of git in a folder, as a person who is known to it; the folder may be another user's."""
    who = {f"GIT_{role}_{part}": "tester@localhost" for role in ("AUTHOR", "COMMITTER") for part in ("NAME", "EMAIL")}
    run = subprocess.run(
        ["git", "-c", "safe.directory=*", *words],
        cwd=folder,
        env={**os.environ, **who},
        check=True,
        capture_output=True,
        text=True,
    )
    return run.stdout


def commit(folder: Path, *tags: str) -> None:
    """Commit all files of a folder, in a repository of its own, and tag the commit."""
    if not (folder / ".git").exists():
        git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", "a state")
    for tag in tags:
        git(folder, "tag", tag)


def build(kind: str, source: Path, out: Path) -> Path:
    """Build the `sdist` or the `wheel` of a folder into `out`, with the packages of this environment."""
    code = f"import setuptools.build_meta as backend; print(backend.build_{kind}({str(out)!r}))"
    built = subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
    return out / built.stdout.splitlines()[-1]


def unpacked(sdist: Path, target: Path) -> Path:
    """Unpack an sdist into `target`; returns its one folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    [folder] = target.iterdir()
    return folder


def version_of(source: Path) -> str:
    """Version that a build of a folder would have; builds nothing."""
    run = subprocess.run(
        [sys.executable, "-m", "setuptools_scm"], cwd=source, check=True, capture_output=True, text=True
    )
    return run.stdout.strip()


def metadata_of(wheel: Path) -> Message:
    """Metadata of a wheel."""
    with ZipFile(wheel) as archive:
        [name] = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name))


def metadata_from(source: Path) -> Message:
    """Metadata that a wheel of a folder would have; builds no wheel."""
    code = "import setuptools.build_meta as backend; print(backend.prepare_metadata_for_build_wheel('.'))"
    made = subprocess.run([sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True)
    return BytesParser().parsebytes((source / made.stdout.splitlines()[-1] / "METADATA").read_bytes())
