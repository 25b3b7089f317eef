# SPDX-License-Identifier: Apache-2.0
"""Run a callback right after a module was imported, without importing it.

- A finder in front of `sys.meta_path` lets the other finders find the module and extends the `exec_module` of that one
  module's loader (PEP 451). No object of the module is touched.
- A callback runs once, in the thread that imports, after the module's own code. What it raises reaches the importer.

Example:

    after_import("verl.workers.engine", register_engine)  # nothing is imported
    import verl.workers.engine                            # register_engine() has run
    after_import("verl.workers.engine", check)            # imported already: check() runs at once
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
    """Call `callback` right after the module `name` was imported; at once if it is imported already."""
    if name in sys.modules:
        callback()
        return
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _waiting.setdefault(name, []).append(callback)
