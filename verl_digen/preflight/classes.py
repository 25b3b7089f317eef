# SPDX-License-Identifier: Apache-2.0
"""Classes that verl loads by name: the recipes name ours, and another one must be a subclass of it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.require import require, suggestion


@dataclass(frozen=True)
class Loaded:
    """The keys that name a class, and our own class."""

    path_key: str
    name_key: str
    module: str
    name: str

    @property
    def path(self) -> str:
        """The module's path, as the recipes write it."""
        return f"pkg://{self.module}"


CLASSES = (
    Loaded("data.custom_cls.path", "data.custom_cls.name", "verl_digen.data.dataset", "DiffusionPromptDataset"),
    Loaded(
        *("trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"),
        *("verl_digen.trainer.replay_buffer", "GroupReplayBuffer"),
    ),
)
MANAGER_KEY = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
MANAGER = "verl_digen.agent_loop.manager.DiffusionAgentLoopManager"


def check_classes(config: DictConfig) -> None:
    """Require every class to be ours, or a subclass of ours that can be loaded."""
    for loaded in CLASSES:
        path, name = (
            OmegaConf.select(config, key, throw_on_missing=True) for key in (loaded.path_key, loaded.name_key)
        )
        if (path, name) != (loaded.path, loaded.name):
            _check_class(loaded, path, name)
    given = OmegaConf.select(config, MANAGER_KEY)
    require(
        isinstance(given, str) and (given == MANAGER or _is_subclass(given)),
        f"{MANAGER_KEY} must be {MANAGER}, or a subclass of it that can be imported",
        given,
        "leave it to the recipes",
    )


def _check_class(loaded: Loaded, path: Any, name: Any) -> None:
    from verl.utils.import_utils import load_extern_object

    importlib.import_module("verl.trainer.ppo.v1")  # which imports the modules of ours, and not the other way round
    ours = getattr(importlib.import_module(loaded.module), loaded.name)
    remedy = "leave both keys to the recipes"
    if path == loaded.path:
        remedy = f"{suggestion(str(name), (loaded.name,))}{remedy}"
    try:
        given = load_extern_object(path, name)
    except Exception as error:  # any exception of the user's module at import
        raise ValueError(
            f"{loaded.name_key} must be a class of {loaded.path_key}={path}, got {name!r} ({type(error).__name__}: "
            f"{error}); {remedy}"
        ) from error
    require(
        isinstance(given, type) and issubclass(given, ours),
        f"{loaded.name_key} must be {loaded.name} or a subclass of it",
        name,
        remedy,
    )


def _is_subclass(given: str) -> bool:
    module, _, name = given.rpartition(".")
    ours = getattr(importlib.import_module(MANAGER.rpartition(".")[0]), MANAGER.rpartition(".")[2])
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError):
        return False
    return isinstance(found, type) and issubclass(found, ours)
