# SPDX-License-Identifier: Apache-2.0
import importlib
import subprocess
import sys

import pytest
import verl  # noqa: F401 - loads the plugin

from verl_digen import plugin

IMPORTED_BY_PLUGIN = """
import sys
import verl
before = set(sys.modules)
import verl_digen.plugin
print(*sorted(set(sys.modules) - before))
"""


@pytest.fixture(scope="module")
def filled_registries():
    """verl's modules that own registries, imported."""
    names = ("trainer.ppo.v1", "workers.engine", "workers.rollout.replica", "workers.rollout.base")
    for name in names:
        importlib.import_module(f"verl.{name}")


def test_verl_loads_the_plugin_and_nothing_fails(filled_registries):
    assert "verl_digen.plugin" in sys.modules
    assert plugin.FAILURES == []


def test_plugin_imports_next_to_nothing():
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY_PLUGIN],
        env={"VERL_USE_EXTERNAL_PLUGINS": "none", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    modules = done.stdout.split()
    assert all(name.startswith("verl_digen") or name in sys.stdlib_module_names for name in modules)


def test_importing_the_package_does_nothing():
    code = "import sys; before = set(sys.modules); import verl_digen; print(*(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["verl_digen"]


def test_everything_is_in_verls_registries(filled_registries):
    from verl.plugin.platform import PlatformRegistry
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert "cpu" in PlatformRegistry.registered_names()
    assert get_trainer_cls("digen_colocated").__module__.startswith("verl_digen.trainer")
    assert "fsdp2" in EngineRegistry._engines["diffusion_model"]
    assert RolloutReplicaRegistry.get("diffusers").__name__ == "DiffusersReplica"
    assert get_rollout_class("diffusers").__name__ == "DiffusersServerAdapter"


def test_a_failure_is_loud_and_filed_and_lets_verl_go_on(capsys, monkeypatch):
    monkeypatch.setattr(plugin, "FAILURES", [])

    def fail():
        raise ImportError("no module named diffusers")

    plugin._reporting_failure("engine", fail)()
    message = capsys.readouterr().err
    assert "verl-digen: its engine could not be registered (ImportError: no module named diffusers)" in message
    assert "digen doctor" in message
    assert len(plugin.FAILURES) == 1


def test_a_program_may_import_our_trainers_before_verl():
    code = "import verl_digen.trainer.base, verl_digen.plugin as plugin; print(plugin.FAILURES)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "[]\n", done.stderr
