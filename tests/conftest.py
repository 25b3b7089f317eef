# SPDX-License-Identifier: Apache-2.0
"""Fixtures that several folders of tests share.

What takes long to import is imported where it is used: pytest-xdist's own process runs no test and needs none of it.
"""

import asyncio
import gc
import inspect
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.loop import run_in_virtual_time
from tests.tiny_models import build_tiny, build_tiny_qwen_image

COROUTINE_S = 300.0
"""Timeout of a test that is a coroutine."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files that mark no test `long` where only those are wanted: each process imports what it collects."""
    wants_long = config.option.markexpr.startswith("long") and collection_path.name.startswith("test_")
    return True if wants_long and not re.search("mark.long|IN_GRID", collection_path.read_text()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files with the mark `slow` to the front: a long one that starts last has one core to itself."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Compute on one core; exempt modules and collected tests from the garbage collector, which took a third of the CPU
    time, and let it look less often at the many small objects of configs."""
    import torch

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    work = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    if pyfuncitem.get_closest_marker("virtual_time"):
        run_in_virtual_time(work)
    else:
        asyncio.run(asyncio.wait_for(work, COROUTINE_S))
    return True


@pytest.fixture(autouse=True)
def own_objectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget objectives that a test registers."""
    from verl_digen.algorithms.objectives import objective

    monkeypatch.setattr(objective, "_OBJECTIVES", dict(objective._OBJECTIVES))


@pytest.fixture
def without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compiled blocks are traced and differentiated ahead, and no machine code is made."""
    import torch

    from verl_digen.models import kernels

    monkeypatch.setattr(kernels, "COMPILER", "aot_eager")
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def yaml_parsed_once() -> Iterator[None]:
    """Parse each yaml file of a package once per session: parsing takes most of the time of a composition."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.plugins import Plugins

    Plugins.instance()  # it makes the classes of sources anew, and registers them
    packages: Any = SourcesRegistry.instance().resolve("pkg")
    read, parsed = packages._read_config, dict[str, bytes]()

    def read_once(source: Any, file: Any) -> Any:
        key = f"{source.path} {source.provider} {file}"
        if key not in parsed:
            parsed[key] = pickle.dumps(read(source, file))
        return pickle.loads(parsed[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "_read_config", read_once)
        yield


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Qwen-Image checkpoint with random weights; read only."""
    return build_tiny_qwen_image(tmp_path_factory.mktemp("tiny_qwen_image"))


@pytest.fixture(scope="session")
def tiny_wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Wan2.1 checkpoint with random weights; read only."""
    return build_tiny("wan2.1", tmp_path_factory.mktemp("tiny_wan") / "checkpoint")


@pytest.fixture(scope="session")
def tiny_ltx2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny LTX-2 checkpoint with random weights, whose videos have sound; read only."""
    return build_tiny("ltx2", tmp_path_factory.mktemp("tiny_ltx2") / "checkpoint")


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    """A node of 4 cores and 2 devices."""
    from tests.local_ray import local_ray

    with local_ray(num_cpus=4, num_gpus=2):
        yield
