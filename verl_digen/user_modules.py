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
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points

from verl_digen.require import refusing, require

KEY = "actor_rollout_ref.model.external_lib"
GROUP = "verl_digen.plugins"
"""Entry points of installed packages; the value of each is a module."""


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
