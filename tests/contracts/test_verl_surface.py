# SPDX-License-Identifier: Apache-2.0
"""The parts of verl and Hydra that we rely on: the first tests to fail when either changes."""

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys

import pytest
from verl.experimental.reward_loop.reward_loop import RewardLoopManager
from verl.workers.rollout.replica import RolloutReplica

import verl_digen


def parameters(function):
    """Names of a function's parameters, without self and cls."""
    return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]


def test_platform_has_the_members_that_ours_implements():
    from verl.plugin.platform import PlatformBase, PlatformRegistry

    from verl_digen.platforms.cpu import CpuPlatform

    assert not CpuPlatform.__abstractmethods__
    assert parameters(PlatformRegistry.register) == ["platform"]
    for name in PlatformBase.__abstractmethods__:
        ours, theirs = getattr(CpuPlatform, name), getattr(PlatformBase, name)
        if callable(theirs):
            assert parameters(ours) == parameters(theirs), name
    assert parameters(CpuPlatform.is_platform_available) == parameters(PlatformBase.is_platform_available)


def test_verl_ships_no_cpu_platform_of_its_own():
    """When this fails, verl_digen.platforms can go."""
    from verl.plugin.platform import PlatformRegistry

    theirs = [PlatformRegistry.get(name) for name in PlatformRegistry.registered_names()]
    assert not any(p.__module__.startswith("verl.") and "CPU" in p.__name__ for p in theirs if p)


def test_verl_gives_its_worker_groups_no_range_of_ports():
    """When this fails, remove verl_digen/engine/rendezvous.py."""
    from verl.single_controller.ray.base import get_master_addr_port
    from verl.trainer.ppo.v1 import trainer_base

    assert 's.bind(("", 0))' in inspect.getsource(get_master_addr_port._function), "a port that is free at once again"
    source = inspect.getsource(trainer_base)
    assert "RayWorkerGroup(" in source and "port_range" not in source


def test_registries_take_what_the_plugin_files():
    from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY, get_trainer_cls, register_trainer
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    assert parameters(register_trainer) == parameters(get_trainer_cls) == ["name"]
    assert "sync" in TRAINER_REGISTRY
    assert parameters(EngineRegistry.register)[:3] == ["model_type", "backend", "device"]
    assert parameters(RolloutReplicaRegistry.register) == ["name", "loader"]
    assert ("vllm", "async") in _ROLLOUT_REGISTRY
    assert all(isinstance(name, str) and "." in name for name in _ROLLOUT_REGISTRY.values())


def test_importing_verl_imports_the_plugin_and_the_trainers_import_no_diffusers():
    called = "verl_digen.processes.cluster"  # by the plugin; a program may import it before verl
    code = f"import hydra, sys, {called}; print('verl_digen.plugin' in sys.modules)"
    code += "; import verl; print(sys.modules['verl_digen.plugin'].FAILURES)"
    code += "; import verl_digen.trainer.disaggregated; print('diffusers' in sys.modules)"
    made = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert made.stdout.splitlines()[-3:] == ["False", "[]", "False"], made.stderr[-2000:]


def test_main_takes_its_primary_config_from_the_package_we_add_to():
    from verl.trainer import main_ppo

    assert '@hydra.main(config_path="config", config_name="ppo_trainer"' in inspect.getsource(main_ppo)


def test_configs_have_the_keys_that_recipes_set():
    from verl.trainer.config.config import ModuleConfig
    from verl.workers.config.reward import RewardManagerConfig
    from verl.workers.config.rollout import AgentLoopConfig

    assert {"agent_loop_manager_class", "default_agent_loop", "num_workers"} <= set(parameters(AgentLoopConfig))
    assert {"source", "name", "module"} <= set(parameters(RewardManagerConfig))
    assert "path" in parameters(ModuleConfig)


def test_processes_reserve_the_cpus_that_preflight_counts():
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage.simple_storage import SimpleStorageUnit
    from verl.single_controller.ray.base import RayResourcePool, ResourcePoolManager

    from verl_digen.preflight import machine

    assert 'bundle = {"CPU": self.max_colocate_count}' in inspect.getsource(RayResourcePool.get_placement_groups)
    assert ResourcePoolManager.max_colocate_count == machine.CPUS_PER_RANK
    of_replica = f"max_colocate_count={machine.CPUS_PER_REPLICA_DEVICE}"
    assert of_replica in inspect.getsource(RolloutReplica.init_standalone)
    for actor in (TransferQueueController, SimpleStorageUnit):
        assert actor._default_options["num_cpus"] == 1  # pyright: ignore[reportFunctionMemberAccess]


def test_hydra_lets_system_exit_of_a_callback_pass_but_no_exception():
    from hydra._internal.callbacks import Callbacks

    class Raising:
        def __init__(self, error):
            self.error = error

        def on_run_start(self, **kwargs):
            raise self.error

    callbacks = Callbacks()
    callbacks.callbacks = [Raising(ValueError("swallowed"))]
    with pytest.warns(UserWarning, match="swallowed"):
        callbacks.on_run_start(config=None, config_name="")  # type: ignore[arg-type]
    callbacks.callbacks = [Raising(SystemExit(2))]
    with pytest.raises(SystemExit):
        callbacks.on_run_start(config=None, config_name="")  # type: ignore[arg-type]


def test_a_weight_update_of_verl_has_the_phases_that_ours_has():
    """`StagedCheckpointManager.stage_weights` calls the same through relays, without the calls around a pause."""
    from verl.checkpoint_engine import CheckpointEngineManager as Theirs

    joins, update = (inspect.getsource(method) for method in (Theirs.build_process_group, Theirs.update_weights))
    assert re.findall(r'execute_checkpoint_engine\(\["(\w+)"\]', joins) == ["prepare"] * 2
    assert joins.count('["init_process_group"]') == 2 and joins.count(".execute_checkpoint_engine(**") == 2
    assert re.findall(r'execute_checkpoint_engine\(\["(\w+)"\]', update) == ["finalize"] * 2
    assert re.findall(r"\b(actor_wg|rollout)\.update_weights\(([^)]*)\)", update)[-2:] == [
        ("actor_wg", "global_steps=global_steps, mode=self.backend"),
        ("rollout", "global_steps=global_steps"),
    ]
    assert re.findall(r"await self\.(\w+)\(", update) == [
        "abort_replicas",
        "release_kv_cache_replicas",
        "resume_kv_cache_replicas",
        "resume_generation_replicas",
    ]


def test_verl_calls_the_hooks_of_a_step_that_we_replace():
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    source = inspect.getsource(PPOTrainer.fit)
    for name in ("step", "on_step_end", "_validate", "_save_checkpoint", "_compute_metrics"):
        assert f"self.{name}(" in source
    assert "reward.num_workers" in inspect.getsource(RewardLoopManager), "0 workers lets us build our own"


# -- verl in memory: its modules and classes hold no function and no class of ours ---------------------------
def replaced():
    """Attributes of the loaded modules of verl, and of their classes, that are functions or classes of ours."""
    import inspect  # tests/e2e/test_facade.py runs the source of this function in a program of its own
    import sys

    def is_ours(value):
        inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        home = inner.__globals__["__name__"] if inspect.isfunction(inner) else getattr(inner, "__module__", None)
        return isinstance(home, str) and home.split(".")[0] == "verl_digen"

    found = []
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "verl" or module is None:
            continue
        for key, value in list(vars(module).items()):
            if inspect.isfunction(value) or inspect.isclass(value):
                found += [f"{name}.{key}"] if is_ours(value) else []
            if inspect.isclass(value) and value.__module__ == name:
                found += [f"{name}.{key}.{inner}" for inner, one in list(vars(value).items()) if is_ours(one)]
    return found


def test_importing_all_of_ours_replaces_nothing():
    for module in pkgutil.walk_packages(verl_digen.__path__, "verl_digen."):
        if "vllm_omni" not in module.name and "patches" not in module.name:
            importlib.import_module(module.name)
    assert replaced() == []
