# SPDX-License-Identifier: Apache-2.0
"""docker/: the Dockerfile's style, its versions against setup.py's, and what reaches a build."""

import fnmatch
import re
import runpy
import shutil
import subprocess
from pathlib import Path
from unittest import mock

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.packaging.building import ROOT, git
from tests.packaging.test_wheel import MADE_BY_A_BUILD, OF_SDIST
from verl_digen.hardware.versions import SUPPORTED

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()
EXTRAS = ("rewards", "rewards,vllm-omni")


def locked(extras: str) -> dict[str, str]:
    """Package -> version that an image with these extras has."""
    lines = (ROOT / "docker" / f"requirements-{extras}.txt").read_text().splitlines()
    assert lines and all(re.fullmatch(r"[a-z0-9._-]+(\[[a-z,]+\])?==\S+( ; .+)?", line) for line in lines)
    return {canonicalize_name(re.split(r"[\[=]", line)[0]): line.partition("==")[2].split()[0] for line in lines}


def required() -> dict[str, list[Requirement]]:
    """Extra, or "" -> what setup.py requires."""
    with mock.patch("setuptools.setup") as setup:
        runpy.run_path(str(ROOT / "setup.py"))
    given = setup.call_args.kwargs
    lists = {"": given["install_requires"], **given["extras_require"]}
    return {name: [Requirement(line) for line in lines] for name, lines in lists.items()}


def reaches_the_build(path: str) -> bool:
    """True if `.dockerignore` lets a path of the checkout through; its last pattern that fits decides."""
    is_in = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.strip().removeprefix("!").removeprefix("**/")
        if pattern and not pattern.startswith("#"):
            parts = [path, *(parent.as_posix() for parent in Path(path).parents)]
            if any(fnmatch.fnmatch(part, pattern) for part in [*parts, *Path(path).parts]):
                is_in = line.startswith("!")
    return is_in


@pytest.mark.parametrize("extras", EXTRAS)
def test_the_image_has_the_versions_that_setup_requires_and_that_were_tested(extras: str):
    found, wanted = locked(extras), required()
    names = ["", *extras.split(",")]
    for requirement in (one for name in names for one in wanted[name]):
        number = found.get(canonicalize_name(requirement.name))
        assert number is not None, f"docker/lock.sh has not been run since {requirement} came"
        assert requirement.specifier.contains(number), f"{requirement}: {number}; run docker/lock.sh"
    for name, supported in SUPPORTED.items():
        assert supported.tested[0].contains(found[canonicalize_name(name)]), name
    assert ("vllm-omni" in found) == ("vllm-omni" in extras)
    assert "pytest" not in found and "cupy-cuda13x" in found


def test_the_base_image_has_the_cuda_of_pytorchs_wheel():
    [number] = re.findall(r"^ARG CUDA_VERSION=(\S+)$", DOCKERFILE, re.MULTILINE)
    toolkit = locked("rewards")["cuda-toolkit"]
    assert number.split(".")[:2] == toolkit.split(".")[:2]


def test_each_copied_file_exists_and_reaches_the_build():
    copied = re.findall(r"^COPY (?!--from)(\S+) ", DOCKERFILE, re.MULTILINE)
    files = [word.replace("${EXTRAS}", extras) for word in copied for extras in EXTRAS if word != "."]
    assert len(files) == len(EXTRAS) and "." in copied
    assert all((ROOT / name).is_file() and reaches_the_build(name) for name in files)


def test_the_image_is_not_run_as_root_and_its_versions_are_pinned():
    user = re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)
    [number] = re.findall(r"^ARG USER_ID=(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user == ["${USER_ID}"] and int(number) > 0
    assert ":latest" not in DOCKERFILE and re.search(r"^FROM \S+:\S+ AS python$", DOCKERFILE, re.MULTILINE)
    installs = [line for line in re.split(r"\n(?! )", DOCKERFILE) if " pip install" in line or "pip install " in line]
    assert len(installs) == 3
    assert all("==" in line or "--requirement" in line or "--no-deps" in line for line in installs)


def test_secrets_and_leftovers_do_not_reach_the_build():
    for name in (".git/config", ".venv/bin/python", "outputs/run/x.pt", "tests/conftest.py", "docs/report.png", ".env"):
        assert not reaches_the_build(name), name
    for name in ("verl_digen/cli.py", "recipes/digen_sd3.yaml", "patches/__init__.py"):
        assert reaches_the_build(name), name
    for name in OF_SDIST - MADE_BY_A_BUILD:  # a wheel is built from these alone
        assert reaches_the_build(name), name
    assert 'SETUPTOOLS_SCM_PRETEND_VERSION_FOR_VERL_DIGEN="${VERSION}" uv build --wheel' in DOCKERFILE
    assert not reaches_the_build("verl_digen/__pycache__/cli.pyc")


# -- every shell script and the Dockerfile pass their linters, which `make lint` runs too --------------------
RULE = re.search(r"^SCRIPTS := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)


def is_script(path: Path) -> bool:
    """True for a file that a shell runs."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.readline().startswith((b"#!/usr/bin/env bash", b"#!/bin/"))


def test_make_lint_reads_every_script_of_the_repository():
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    assert RULE is not None
    listed = {path.relative_to(ROOT).as_posix() for word in RULE[1].split() for path in ROOT.glob(word)}
    tracked = git(ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    scripts = {name for name in tracked if is_script(ROOT / name)}
    assert scripts == listed


def test_make_gives_pip_to_an_environment_without_as_uv_makes_it(tmp_path):
    for name in (".ci/setup_env.sh", "setup.py", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name, text in ((".venv/bin/python", ""), ("bin/python3", '[ "$1" = -c ] || { echo "$@"; exit 1; }')):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"}
    done = subprocess.run([tmp_path / ".ci/setup_env.sh"], env=path, capture_output=True, text=True, check=False)
    assert done.stdout == "-m venv .venv\n"
