# SPDX-License-Identifier: Apache-2.0
import importlib
import sys

import pytest

from verl_digen.plugin import after_import


@pytest.fixture
def make_module(tmp_path, monkeypatch):
    """Write an importable module, and forget it after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names = []

    def make(name, source="loaded = True"):
        (tmp_path / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        names.append(name)
        return name

    yield make
    for name in names:
        sys.modules.pop(name, None)


def test_callbacks_run_once_in_their_order_after_the_module_is_complete_and_import_nothing(make_module):
    name = make_module("digen_hooks_once")
    seen = []
    for number in range(3):
        after_import(name, lambda number=number: seen.append((number, sys.modules[name].loaded)))
    assert name not in sys.modules
    importlib.import_module(name)
    importlib.import_module(name)
    assert seen == [(number, True) for number in range(3)]


def test_callback_of_an_imported_module_runs_at_once(make_module):
    name = make_module("digen_hooks_late")
    importlib.import_module(name)
    seen = []
    after_import(name, lambda: seen.append(name))
    assert seen == [name]


def test_callback_may_import_the_module_itself(make_module):
    name = make_module("digen_hooks_self")
    seen = []
    after_import(name, lambda: seen.append(importlib.import_module(name).loaded))
    importlib.import_module(name)
    assert seen == [True]


def test_module_keeps_its_loader_and_source(make_module):
    import inspect

    name = make_module("digen_hooks_loader", "def f():\n    return 1\n")
    after_import(name, lambda: None)
    module = importlib.import_module(name)
    assert inspect.getsource(module.f) == "def f():\n    return 1\n"
    assert module.__spec__ is not None and type(module.__spec__.loader).__name__ == "SourceFileLoader"


def test_other_modules_and_missing_ones_are_left_alone(make_module):
    name = make_module("digen_hooks_other")
    seen = []
    after_import("digen_hooks_missing", lambda: seen.append("missing"))
    importlib.import_module(name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("digen_hooks_missing")
    assert seen == []


def test_what_a_callback_raises_reaches_the_importer(make_module):
    name = make_module("digen_hooks_error")

    def fail():
        raise RuntimeError("from the callback")

    after_import(name, fail)
    with pytest.raises(RuntimeError, match="from the callback"):
        importlib.import_module(name)
