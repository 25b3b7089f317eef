# SPDX-License-Identifier: Apache-2.0
"""verl in memory: its modules and classes hold no function and no class of ours."""

import importlib
import pkgutil

from verl.single_controller.ray.base import RayWorkerGroup

import verl_digen


def replaced():
    """Attributes of the loaded modules of verl, and of their classes, that are functions or classes of ours."""
    import inspect
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


def test_a_method_that_is_replaced_is_found(monkeypatch):
    from verl_digen.engine.rendezvous import free_port

    monkeypatch.setattr(RayWorkerGroup, "_get_master_addr_port", free_port)
    assert "verl.single_controller.ray.base.RayWorkerGroup._get_master_addr_port" in replaced()
