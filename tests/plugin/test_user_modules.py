# SPDX-License-Identifier: Apache-2.0
"""Modules of a user's own, outside the repository: registered in every process, and before anything looks them up."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray.cloudpickle as cloudpickle  # Ray's own pickles, of what it hands to a process
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass

from tests import own_parts
from tests.local_ray import shared_server
from verl_digen import cli, user_modules
from verl_digen.config import digen_config
from verl_digen.environments.episodes import EnvironmentWorker
from verl_digen.models import MODELS
from verl_digen.preflight import check
from verl_digen.preflight.model import load_configs
from verl_digen.reward.manager import DiffusionRewardManager, RewardPoolWorker
from verl_digen.tools.plan.output import make_plan
from verl_digen.user_modules import GROUP, KEY, import_user_modules

pytestmark = pytest.mark.slow

Start = Callable[..., DictConfig]

CHILD = """
import pickle
import sys

start, arguments = pickle.load(sys.stdin.buffer)
started = start(*arguments)

from verl_digen.algorithms.objectives import objective_names
from verl_digen.models import MODELS
from verl_digen.reward.named import BUILT_IN

assert "OwnPipeline" in MODELS and "own_loss" in objective_names() and "own_reward" in BUILT_IN
"""
"""A new process, which starts with the constructor and the arguments that Ray hands to it."""


SLIPS = """
from own_model import Own
from verl_digen.models.base import DiffusionModel


class Idle(DiffusionModel):
    spec = Own.spec


class Short(Own):
    def sigmas(self, num_steps):
        return super().sigmas(num_steps)


class Unmade(Own):
    def __init__(self, path):
        self.size = self.nosuch
"""

MAIN = "import sys; from verl_digen.cli import main; sys.exit(main())"


def kept(config: Any) -> Any:
    """Stands for a constructor that keeps its argument."""
    return config


@pytest.fixture
def own(tmp_path: Path, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Checkpoint of the user's own model; its modules can be imported, and are not yet."""
    folder = tmp_path / "own"
    folder.mkdir()
    own_parts.write_modules(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=":")
    with own_parts.forgotten(own_parts.NAME, "own_model"):
        yield own_parts.write_checkpoint(folder / "checkpoint", tiny_qwen_image)


def own_words(runnable: list[str], checkpoint: Path) -> list[str]:
    return [
        *runnable,
        f"actor_rollout_ref.model.path={checkpoint}",
        f"{KEY}={own_parts.NAME}",
        "digen.loss.name=own_loss",
        "digen.reward.recipe_functions={own_reward: 1.0}",
    ]


def test_a_run_and_a_plan_accept_what_only_the_users_module_registers(own, start: Start, runnable):
    words = own_words(runnable, own)
    with pytest.raises(ValueError, match=r"must hold a checkpoint of one of .*, got a OwnPipeline"):
        check(start(*(word for word in words if not word.startswith(KEY))))
    check(start(*words))
    assert "a model of one's own" in make_plan(words).run.measured.title


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("own_modell:Own", "MODULE:CLASS that can be imported, got 'own_modell:Own' (ModuleNotFoundError: No module"),
        ("own_model:Owned", "MODULE:CLASS that can be imported, got 'own_model:Owned' (AttributeError: module"),
        ("own_model.Own", "MODULE:CLASS that can be imported, got 'own_model.Own' (ValueError: not enough values"),
        ("own_model:make", "a class of verl_digen.models.base.DiffusionModel, got <function make"),
        ("own_model:OwnPipeline", "a class of verl_digen.models.base.DiffusionModel, got <class 'own_model.OwnPipe"),
        ("own_slips:Idle", "a class of DiffusionModel with latent_shape(self, geometry), got 'Idle' (TypeError: it"),
        ("own_slips:Short", "a class of DiffusionModel with sigmas(self, num_steps, geometry), got 'Short' (TypeError"),
    ],
)
def test_an_own_model_that_cannot_be_made_is_told_from_a_damaged_checkpoint(own, target, told):
    (own.parent / "own_slips.py").write_text(SLIPS)
    with own_parts.forgotten("own_slips"):
        MODELS["OwnPipeline"] = target
        with pytest.raises(ValueError) as refused:
            load_configs(str(own))
    assert f"MODELS['OwnPipeline'] must be {told}" in str(refused.value)


def test_an_own_model_whose_constructor_fails_is_named_beside_the_checkpoint(own):
    (own.parent / "own_slips.py").write_text(SLIPS)
    with own_parts.forgotten("own_slips"):
        MODELS["OwnPipeline"] = "own_slips:Unmade"
        told = r"path must hold configs that own_slips:Unmade can read, got .* \(AttributeError: .*or repair that class"
        with pytest.raises(ValueError, match=told):
            load_configs(str(own))


def test_what_a_module_says_of_itself_is_not_hidden_by_its_cause(tmp_path, monkeypatch):
    (tmp_path / "own_loss_slip.py").write_text(
        "from verl_digen.algorithms.objectives import register_objective\n"
        "register_objective('slip', columns=('reward',))(lambda rows: rows)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"got 'own_loss_slip' \(ValueError: the loss 'slip' must be a func.*def"):
        import_user_modules("own_loss_slip")


@pytest.mark.parametrize(
    "process", ["task runner", "trainer rank", "diffusers replica", "functions", "pool", "environment"]
)
def test_a_new_process_registers_them_from_what_it_is_given(own, start: Start, runnable, tmp_path, process):
    words = own_words(runnable, own)
    if process == "environment":
        words.append(
            f"digen.environment.path={Path(__file__).parents[2]}/examples/drawn_world/shape_edits.py:ShapeEdits"
        )
    config = start(*words)
    if process == "diffusers replica":
        handed = kept, (omega_conf_to_dataclass(config.actor_rollout_ref.model),)
    elif process == "trainer rank":
        handed = omega_conf_to_dataclass, (config.actor_rollout_ref.model,)
    else:
        handed = {
            "task runner": (digen_config, (config,)),
            "functions": (DiffusionRewardManager, (config,)),
            "pool": (RewardPoolWorker, (config, "own_reward")),
            "environment": (EnvironmentWorker, (config,)),
        }[process]
    (tmp_path / "child.py").write_text(CHILD)
    done = subprocess.run(
        [shared_server().python, "-m", "child"],
        input=cloudpickle.dumps(handed),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{Path(__file__).parents[2]}"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def install(folder: Path) -> None:
    """Make a package of the modules in `folder`."""
    package = folder / "own_parts-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(f"[{GROUP}]\nown = {own_parts.NAME}\n")


def test_modules_of_an_installed_package_need_no_key(own):
    install(own.parent)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "doctor", "--selftest", "own"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok" in done.stdout and "FAIL" not in done.stdout


def test_an_installed_package_that_is_broken_is_named(own, capsys):
    install(own.parent)
    (own.parent / f"{own_parts.NAME}.py").write_text("raise RuntimeError('no licence')")
    user_modules._import_installed.cache_clear()
    assert cli.main(["timeline", "nosuch"]) == cli.EXIT_REFUSED
    said = f"digen timeline: entry points {GROUP} must name modules that can be imported, got 'own = {own_parts.NAME}' "
    assert capsys.readouterr().err.startswith(f"{said}(RuntimeError: no licence); repair or uninstall the package")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("nosuch", r"that can be imported, got 'nosuch' \(ModuleNotFoundError: .* PYTHONPATH on every node"),
        (["json", "broken_user_code"], r"got 'broken_user_code' \(RuntimeError: no licence\)"),
        ("leaving_user_code", r"got 'leaving_user_code' \(SystemExit: 3\)"),
        ("own/my_models.py", r", not files, got 'own/my_models.py'; write my_models, and add its folder to PYTHONPATH"),
        ("my_models.py", r", not files, got 'my_models.py'; write my_models"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_its_key(tmp_path, monkeypatch, given, said):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_user_code.py").write_text("raise RuntimeError('no licence')")
    (tmp_path / "leaving_user_code.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match=rf"^{KEY} must name modules.*{said}"):
        import_user_modules(given)
