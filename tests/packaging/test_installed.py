# SPDX-License-Identifier: Apache-2.0
"""`pip install` of the sdist and of the wheel into a bare environment, and first use there, away from any checkout."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.packaging.building import build, commit, copy_checkout
from tests.packaging.test_wheel import RELEASE

pytestmark = [pytest.mark.long, pytest.mark.grid]

QUICK_START = "recipe=digen_quickstart"
TIMEOUT_S = 900
RUN_OF_A_CHECKOUT = ("PYTHONPATH", "VERL_USE_EXTERNAL_PLUGINS", "VIRTUAL_ENV")
"""Variables that an installed package must do without."""


def said(command: Sequence[str | Path], folder: Path) -> str:
    """Output of a command that must succeed, run in `folder`."""
    environment = {key: value for key, value in os.environ.items() if key not in RUN_OF_A_CHECKOUT}
    run = subprocess.run(
        [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert run.returncode == 0, f"{command}: {run.stdout}\n{run.stderr}"
    return run.stdout


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The versions of this environment as constraints: those that were tested, and no others are downloaded."""
    frozen = said([sys.executable, "-m", "pip", "freeze", "--exclude-editable", "--exclude", "verl-digen"], Path.cwd())
    lines = [line.partition(" @ ")[0] + "\n" if " @ " in line else f"{line}\n" for line in frozen.splitlines()]
    file = tmp_path_factory.mktemp("versions") / "constraints.txt"
    file.write_text("".join(line for line in lines if "==" in line))
    return file


def index_of_torch() -> list[str | Path]:
    """pip's options for the build of PyTorch that is installed here, which no index but PyTorch's own has."""
    if "TORCH_INDEX" in os.environ:
        return ["--extra-index-url", os.environ["TORCH_INDEX"]]
    if "PIP_FIND_LINKS" in os.environ or "+" not in version("torch"):
        return []
    return ["--extra-index-url", f"https://download.pytorch.org/whl/{version('torch').partition('+')[2]}"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Program folder of an environment with pip alone."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    said([sys.executable, "-m", "venv", folder], folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module", params=["wheel", "sdist"])
def programs(
    request: pytest.FixtureRequest, bare: Path, versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The environment's program folder, with the package from one of the two files; first the wheel with all that it
    requires, then the sdist in its place, which pip builds in an environment of its own."""
    folder = tmp_path_factory.mktemp(request.param)
    source = copy_checkout(folder / "source")
    commit(source, f"v{RELEASE}")
    file = build(request.param, source, folder)
    more = (
        ["--no-deps", "--force-reinstall"]
        if request.param == "sdist"
        else ["--constraint", versions, *index_of_torch()]
    )
    said([bare / "python", "-m", "pip", "install", "--quiet", "--no-compile", *more, file], folder)
    return bare


def test_pip_finds_no_conflict(programs: Path, tmp_path: Path):
    said([programs / "python", "-m", "pip", "check"], tmp_path)


def test_verls_main_composes_a_recipe(programs: Path, tmp_path: Path):
    words = [QUICK_START, "trainer.total_training_steps=7", "--cfg", "job"]
    shown = said([programs / "python", "-m", "verl.trainer.main_ppo", *words], tmp_path)
    assert "total_training_steps: 7" in shown and "trainer_mode: digen_colocated" in shown
    assert "shapes_reward.py" in shown, "a value of the recipe"


def test_the_command_helps_and_the_doctor_finds_no_problem(programs: Path, tmp_path: Path):
    assert "doctor" in said([programs / "digen", "--help"], tmp_path)
    report = json.loads(said([programs / "digen", "doctor", "--json"], tmp_path))
    assert report["plugin_loaded"] and report["problems"] == []
    assert report["versions"]["verl-digen"] == RELEASE


def test_the_version_is_the_releases(programs: Path, tmp_path: Path):
    ask = "import verl_digen; print(verl_digen.__version__, verl_digen.__file__)"
    number, file = said([programs / "python", "-c", ask], tmp_path).split()
    assert number == RELEASE and Path(file).is_relative_to(programs.parent)
