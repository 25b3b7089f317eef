# SPDX-License-Identifier: Apache-2.0
"""Import of a user's own modules: the models, objectives and names that they register are known in every process.

| process | imports when |
| --- | --- |
| driver, task runner, agent loop, reward and environment workers; `digen plan` | `digen_config` reads verl's config |
| trainer ranks, servers of vLLM-Omni; `digen sample`, `digen export` | `DiffusionModelConfig` is made |
| `diffusers` replicas | `DiffusionModelConfig` is unpickled |
| processes of vLLM-Omni's engine | the worker makes its device |
| every `digen` command | it starts: installed packages alone |

So a new kind of process gets verl's config or a `DiffusionModelConfig`, never a section of them.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from verl_digen.require import refusing, require

KEY = "actor_rollout_ref.model.external_lib"
GROUP = "verl_digen.plugins"
"""Entry points of installed packages; the value of each is a module."""
FILE_END = ".py:"


def import_user_modules(given: str | Sequence[str] | None = None) -> None:
    """Import the modules of installed packages, and those that `given`, the value of `KEY` as verl reads it (a name or
    a list of them), names. Idempotent. ValueError: a module cannot be imported."""
    _import_installed()
    names = () if given is None else (given,) if isinstance(given, str) else tuple(given)
    for name in names:
        file = name.rpartition("/")[2].removesuffix(".py")
        require(
            "/" not in name and not name.endswith(".py"),
            f"{KEY} must name modules, not files",
            name,
            f"write {file}, and add its folder to PYTHONPATH on every node",
        )
        remedy = "repair it, or put its folder on PYTHONPATH on every node"
        with refusing(f"{KEY} must name modules that can be imported", name, remedy):
            importlib.import_module(name)


@cache
def _import_installed() -> None:
    for entry in entry_points(group=GROUP):
        given, remedy = f"{entry.name} = {entry.value}", "repair or uninstall the package that has it"
        with refusing(f"entry points {GROUP} must name modules that can be imported", given, remedy):
            entry.load()


def load(target: str, key: str, known: str) -> Any:
    """Load "package.module:NAME", "FILE.py:NAME" or "package.module.NAME", which Hydra takes on the command line
    without quotes. ValueError if it cannot be loaded; it names the config key `key` and what else that may name,
    `known`."""
    module_name, _, attribute = target.rpartition(":" if ":" in target else ".")
    require(bool(module_name and attribute), f"{key} must name {known}", target, "write one of them")
    remedy = "check the name, FILE.py:NAME or package.module.NAME, and that it is installed"
    with refusing(f"{key} must name what can be loaded", target, remedy):
        module = _load_file(module_name) if FILE_END in target else importlib.import_module(module_name)
        return getattr(module, attribute)


def _load_file(path: str) -> ModuleType:
    """Import a file as a module of a name of its own, once per process: dataclasses in it look their module up, which
    verl's `load_extern_object` does not register. It may import modules beside it, as a script may."""
    file = Path(path).expanduser().absolute()
    name = f"{__name__}_{sha256(bytes(file)).hexdigest()[:12]}"
    if name not in sys.modules:
        # the loader is named, so that a file with another ending is one that is not there
        spec = importlib.util.spec_from_file_location(name, file, loader=SourceFileLoader(name, str(file)))
        assert spec is not None and spec.loader is not None
        sys.path.append(str(file.parent))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
