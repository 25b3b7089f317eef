# SPDX-License-Identifier: Apache-2.0
"""Rules for rewards: the functions that are named, verl's keys around them, and their devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import digen_config
from verl_digen.require import require
from verl_digen.reward.functions import formula, require_reward_function, resolve

CUSTOM_KEY = "reward.custom_reward_function"
MODULE_PREFIX = "pkg://"
FILE_PREFIX = "file://"
OLDER_KEYS = {
    "custom_reward_function": CUSTOM_KEY,
    "reward_model": "reward.reward_model, reward.reward_manager or reward",
}
"""Sections of verl's older configs, which its main entry does not read, and where their keys are now."""


def check_reward_keys(config: DictConfig) -> None:
    """Refuse keys of verl's older configs, and a reward model of verl's."""
    for section, place in OLDER_KEYS.items():
        given = dict(_leaves(OmegaConf.select(config, section), section))
        require(
            not given,
            f"{' and '.join(given)} must be left out: verl's main does not read its older section {section!r}",
            list(given.values()),
            f"the keys are under {place} now",
        )
    require(
        not config.reward.reward_model.enable,
        "reward.reward_model.enable must be false: a diffusion run starts no server for a reward model",
        config.reward.reward_model.enable,
        f"call a server of your own from a reward function, {CUSTOM_KEY}.path=FILE",
    )


def check_rewards(config: DictConfig) -> None:
    """Require a reward, and that every named function can be loaded and called."""
    weights = reward_weights(config)
    require(
        bool(weights),
        "digen.reward.functions must name a reward function and its weight",
        weights,
        f"set e.g. digen.reward.functions.jpeg_compressibility=1.0, or {CUSTOM_KEY}.path",
    )
    require(
        any(weights.values()),
        "digen.reward.functions and digen.reward.custom_weight must have a weight that is not 0",
        weights,
        "nothing would be learnt; give the function to train on a weight of 1",
    )
    for name in digen_config(config).reward.functions:
        resolve(name)
    if has_custom(config):
        _check_custom(config)


def check_reward_manager(config: DictConfig) -> None:
    """Require the reward manager to be ours or one of the user's, not one of verl's for text."""
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    section = config.reward.reward_manager
    require(
        section.source == "importlib",
        "reward.reward_manager.source must be importlib, because the managers that verl registers score text",
        section.source,
        "leave reward.reward_manager alone; a reward of your own is a function",
    )
    try:
        resolve_reward_manager_cls(config)
    except (Exception, SystemExit) as error:  # any exception of the user's module at import
        raise ValueError(
            f"reward.reward_manager must name a class that can be imported, got {section.name!r} of "
            f"{section.module.path!r} ({type(error).__name__}: {error}); leave reward.reward_manager alone, a reward "
            "of your own is a function"
        ) from error


def check_reward_devices(config: DictConfig) -> None:
    """Require devices for a pool of reward devices."""
    model = config.reward.reward_model
    for name in ("nnodes", "n_gpus_per_node"):
        require(
            not model.enable_resource_pool or (isinstance(model[name], int) and model[name] >= 1),
            f"reward.reward_model.{name} must be >= 1 with reward.reward_model.enable_resource_pool=true",
            model[name],
            "give the nodes and devices per node of the pool that reward workers divide, beside the trainer's",
        )


def reward_weights(config: DictConfig) -> dict[str, float]:
    """Name -> weight of every function of the run."""
    return digen_config(config).reward.weights(has_custom=has_custom(config))


def reward_formula(config: DictConfig) -> str:
    """The reward that the run trains on, for people."""
    return formula(reward_weights(config))


def has_custom(config: DictConfig) -> bool:
    """True if there is a reward function of the user's own."""
    return config.reward.custom_reward_function.path is not None


def _check_custom(config: DictConfig) -> None:
    """Require the user's file, and load its function as reward workers will."""
    from verl.utils.import_utils import load_extern_object

    section = config.reward.custom_reward_function
    path, name = section.path, section.name
    is_module = isinstance(path, str) and path.startswith(MODULE_PREFIX)
    require(
        is_module or (isinstance(path, str) and Path(path.removeprefix(FILE_PREFIX)).is_file()),
        f"{CUSTOM_KEY}.path must be an existing file, or pkg://MODULE",
        path,
        f"check the path (it is relative to the working directory {Path.cwd()})",
    )
    require(
        isinstance(name, str),
        f"{CUSTOM_KEY}.name must be the name of a function in {path}",
        name,
        "compute_score is verl's default",
    )
    try:
        function = load_extern_object(path, name)
    except (Exception, SystemExit) as error:  # any exception of the user's module at import
        cause = error.__cause__ or error
        raise ValueError(
            f"{CUSTOM_KEY}.path={path} must be a module that can be imported and has a function "
            f"{CUSTOM_KEY}.name={name}, got {type(cause).__name__}: {cause}; repair the file, or install what it "
            "imports"
        ) from error
    require_reward_function(f"{CUSTOM_KEY} ({name} of {path})", function, _extra(section))


def _extra(section: DictConfig) -> Mapping[str, Any]:
    """Keyword arguments that the user gives the function."""
    values: Any = OmegaConf.to_container(section, resolve=True)
    extra = values.get("reward_kwargs")  # a key of verl's that is absent by default
    require(
        extra is None or isinstance(extra, dict),
        f"{CUSTOM_KEY}.reward_kwargs must be a mapping of arguments",
        extra,
        f"set e.g. +{CUSTOM_KEY}.reward_kwargs.scale=2",
    )
    return extra or {}


def _leaves(node: Any, key: str) -> Iterator[tuple[str, Any]]:
    """(full key, value) of every value that is not null."""
    if isinstance(node, DictConfig):
        for name in node:
            yield from _leaves(node[name], f"{key}.{name}")
    elif node is not None:
        yield key, node
