# SPDX-License-Identifier: Apache-2.0
"""The `verl.plugins` entry point, and the only module of the package that acts when it is imported.

verl imports it inside `import verl`, in the driver and in every Ray process, so it imports nothing heavy: it registers
callbacks that fill verl's registries when verl imports the modules that own them, at the end of this file.

verl hides the error of a plugin that fails. So a failure here is printed to stderr and kept in `FAILURES`, verl
continues, and `verl_digen.preflight` refuses to start a run of ours.

`after_import` waits for a module without importing it: a finder in front of `sys.meta_path` lets the other finders find
the module and extends the `exec_module` of that one module's loader (PEP 451). No object of the module is touched.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}
"""Module name -> callbacks that wait for it."""


class _CallbackFinder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            _run_callbacks_after_exec(spec.loader, fullname)
        return spec


def _run_callbacks_after_exec(loader: Any, name: str) -> None:
    exec_module = loader.exec_module

    def exec_and_call(module: ModuleType) -> None:
        exec_module(module)
        for callback in _waiting.pop(name, []):
            callback()

    loader.exec_module = exec_and_call  # path finders make one loader object per module


_finder = _CallbackFinder()


def after_import(name: str, callback: Callable[[], None]) -> None:
    """Call `callback` once, right after the module `name` was imported, in the thread that imports it; at once if it is
    imported already. What the callback raises reaches the importer."""
    if name in sys.modules:
        callback()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _waiting.setdefault(name, []).append(callback)


FAILURES: list[str] = []
"""Failed registrations of this process, one sentence each."""


def _register_platform() -> None:
    from verl.plugin.platform import PlatformRegistry

    from verl_digen.platforms.cpu import CpuPlatform

    if "cpu" not in PlatformRegistry.registered_names():  # verl's or another plugin's takes precedence
        PlatformRegistry.register(platform="cpu")(CpuPlatform)


def _register_resolver() -> None:
    from omegaconf import OmegaConf

    from verl_digen.rollout.registry import GENERATOR, default_generator

    OmegaConf.register_new_resolver(GENERATOR, default_generator, replace=True)


def _register_trainers() -> None:
    for mode in ("colocated", "disaggregated"):  # importing them registers them
        import_module(f"verl_digen.trainer.{mode}")


def _register_replicas() -> None:
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from verl_digen.rollout.registry import REPLICAS

    for name, entry in REPLICAS.items():
        RolloutReplicaRegistry.register(name, entry.load)


def _register_weight_senders() -> None:
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY

    from verl_digen.rollout.registry import REPLICAS

    for name, entry in REPLICAS.items():
        _ROLLOUT_REGISTRY[(name, "async")] = entry.sender


def _reporting_failure(noun: str, register: Callable[[], object]) -> Callable[[], None]:
    """Wrap `register` to print and keep what it raises, under `noun`: verl must work without us."""

    def run() -> None:
        try:
            register()
        except Exception as error:
            FAILURES.append(f"its {noun} could not be registered ({type(error).__name__}: {error})")
            print(
                f"verl-digen: {FAILURES[-1]}; its recipes cannot run. `digen doctor` says what is missing; "
                "VERL_USE_EXTERNAL_PLUGINS=none starts verl without plugins.",
                file=sys.stderr,
                flush=True,
            )

    return run


_reporting_failure("platform", _register_platform)()
after_import("omegaconf", _reporting_failure("resolver", _register_resolver))
after_import("hydra", _reporting_failure("recipes", lambda: import_module("verl_digen.recipe_source").register()))
after_import(
    "hydra", _reporting_failure("fork server", lambda: import_module("verl_digen.processes.cluster").start_early())
)
after_import("verl.trainer.ppo.v1", _reporting_failure("trainers", _register_trainers))
after_import("verl.workers.engine", _reporting_failure("engine", partial(import_module, "verl_digen.engine.engine")))
after_import("verl.workers.rollout.replica", _reporting_failure("replicas", _register_replicas))
after_import("verl.workers.rollout.base", _reporting_failure("weight senders", _register_weight_senders))
