# SPDX-License-Identifier: Apache-2.0
"""Import of the examples' scripts, which lie in folders and not in a package."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def examples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Import scripts by their names, as they import each other; the test's module lists their `FOLDERS`."""
    folders: tuple[Path, ...] = request.module.FOLDERS
    before = set(importlib.sys.modules)
    monkeypatch.setattr("sys.path", [*map(str, folders), *importlib.sys.path])
    yield
    for name in set(importlib.sys.modules) - before:
        source = getattr(importlib.sys.modules[name], "__file__", None)
        if source is not None and Path(source).parent in folders:
            del importlib.sys.modules[name]
