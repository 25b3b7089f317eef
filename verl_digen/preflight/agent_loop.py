# SPDX-License-Identifier: Apache-2.0
"""Rules for the agent loop: ours, or one of the user's own, named in a file of verl's form."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import digen_config
from verl_digen.require import require

SECTION = "actor_rollout_ref.rollout.agent"


def check_agent_loop(config: DictConfig) -> None:
    """Require an agent loop that is known, can be imported, and makes every sample of the run."""
    from verl_digen.sampling.requests import SINGLE_TURN

    agent = config.actor_rollout_ref.rollout.agent
    named = {} if agent.agent_loop_config_path is None else _named_loops(agent.agent_loop_config_path)
    name = agent.default_agent_loop
    require(
        name == SINGLE_TURN or name in named,
        f"{SECTION}.default_agent_loop must be one of {', '.join([SINGLE_TURN, *named])}",
        name,
        f"leave it alone, or name a loop of your own in a file, {SECTION}.agent_loop_config_path=FILE",
    )
    policy = digen_config(config).tag.policy
    require(
        name == SINGLE_TURN or policy == "off",
        f"digen.tag.policy must be off with {SECTION}.default_agent_loop={name}, because trainer ranks generate "
        "without an agent loop",
        policy,
        "set digen.tag.policy=off",
    )
    if name in named:
        _check_importable(name, named[name])


def _named_loops(path: str) -> dict[str, str]:
    """Name -> class of every entry of the file."""
    key = f"{SECTION}.agent_loop_config_path"
    require(
        isinstance(path, str) and Path(path).is_file(),
        f"{key} must be an existing file",
        path,
        f"check the path (it is relative to the working directory {Path.cwd()})",
    )
    form = "write a list of {name: NAME, _target_: package.module.Class}"
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:  # of YAML, OmegaConf or the file system
        raise ValueError(
            f"{key} must be a YAML file, got {path!r} ({type(error).__name__}: {error}); {form}"
        ) from error
    is_list = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("_target_"), str)
        for entry in entries
    )
    if not isinstance(entries, list) or not is_list:
        raise ValueError(f"{key} must list agent loops with a name and a _target_ each, got {entries!r}; {form}")
    return {entry["name"]: entry["_target_"] for entry in entries}


def _check_importable(name: str, target: str) -> None:
    from hydra.utils import get_class

    from verl_digen.agent_loop.single_turn import DiffusionSingleTurnAgentLoop

    try:
        found = get_class(target)
    except (Exception, SystemExit) as error:  # any exception of the user's module at import
        raise ValueError(
            f"the agent loop {name!r} must be a class that can be imported, got {target!r} ({type(error).__name__}: "
            f"{error}); repair it, or put its folder on PYTHONPATH"
        ) from error
    require(
        issubclass(found, DiffusionSingleTurnAgentLoop),
        f"the agent loop {name!r} must be a subclass of verl_digen.agent_loop.single_turn."
        "DiffusionSingleTurnAgentLoop, whose run returns a sample",
        target,
        "derive it from that class",
    )
