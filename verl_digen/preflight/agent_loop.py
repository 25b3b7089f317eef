# SPDX-License-Identifier: Apache-2.0
"""Rules for agent loops (ours, or the user's, named in a file as verl reads it), environments and trees."""

from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import OmegaConf

from verl_digen.algorithms.objectives import find_objective
from verl_digen.config import DigenConfig
from verl_digen.environments.built_in import environment_class, environment_settings
from verl_digen.preflight.inputs import has_checkpoint
from verl_digen.preflight.model import load_configs
from verl_digen.preflight.pools import COLOCATED
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import as_typed, refusing, require
from verl_digen.sampling.requests import SINGLE_TURN

SECTION = "actor_rollout_ref.rollout.agent"
NO_LOOP = (
    "digen.tag.policy",
    "off",
    ", because trainer ranks generate without an agent loop",
    "set digen.tag.policy=off",
)


def check_agent_loop(run: StartConfig) -> None:
    """Require an agent loop that is known, can be imported, and makes every sample of the run."""
    agent = run.config.actor_rollout_ref.rollout.agent
    named = {} if agent.agent_loop_config_path is None else _named_loops(agent.agent_loop_config_path)
    name = agent.default_agent_loop
    require(
        name == SINGLE_TURN or name in named,
        f"{SECTION}.default_agent_loop must be one of {', '.join([SINGLE_TURN, *named])}",
        name,
        f"leave it alone, or name a loop of your own in a file, {SECTION}.agent_loop_config_path=FILE",
    )
    if name != SINGLE_TURN:
        run.require_values(f"with {SECTION}.default_agent_loop={name}", NO_LOOP)
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
    with refusing(f"{key} must be a YAML file", path, form):
        entries: Any = OmegaConf.to_container(OmegaConf.load(path))
    is_list = isinstance(entries, list) and all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("_target_"), str)
        for entry in entries
    )
    require(is_list, f"{key} must list agent loops with a name and a _target_ each", entries, form)
    return {entry["name"]: entry["_target_"] for entry in entries}


def _check_importable(name: str, target: str) -> None:
    from verl_digen.agent_loop.single_turn import DiffusionSingleTurnAgentLoop

    remedy = "repair it, or put its folder on PYTHONPATH"
    with refusing(f"the agent loop {name!r} must be a class that can be imported", target, remedy):
        found = get_class(target)
    require(
        issubclass(found, DiffusionSingleTurnAgentLoop),
        f"the agent loop {name!r} must be a subclass of verl_digen.agent_loop.single_turn."
        "DiffusionSingleTurnAgentLoop, whose run returns a sample",
        target,
        "derive it from that class",
    )


def check_branches(run: StartConfig) -> None:
    """Require as many samples of a prompt as a tree has leaves, and prompts that no agent loop rewrites."""
    branches = run.digen.branches
    if not branches.splits:
        return
    num_leaves, again = branches.factor ** len(branches.splits), "set it, or split another number of times"
    why, remedy = ": samples with prompts of their own share no steps", "leave it out, or set digen.branches.splits=[]"
    run.require_values(
        f"with digen.branches.splits={as_typed(branches.splits)} and digen.branches.factor={branches.factor}",
        ("actor_rollout_ref.rollout.n", num_leaves, ", the leaves of a tree", again),
        (f"{SECTION}.default_agent_loop", SINGLE_TURN, why, remedy),
    )


def check_environment(run: StartConfig) -> None:
    """Require an environment that can be made, and a run whose every part knows episodes."""
    digen = run.digen
    if not digen.environment.is_on:
        return
    run.refuse_values(
        f"with {digen.environment.key}",
        ("digen.rollout.encoders", "before", ", whose prompts are made during the run", "set it to host"),
        ("digen.reward.combine", "gdpo", ", whose reward has no weight", "leave it out"),
    )
    found = environment_class(digen.environment)
    settings, most = environment_settings(digen.environment, found), digen.environment.max_turns
    rule = f"{digen.environment.key}: num_turns of {found.__name__} must return the most turns of an episode, or None"
    with refusing(rule, settings, "repair it"):
        num_turns = found.num_turns(settings)
        fits = num_turns is None or num_turns <= most
    require(
        fits,
        f"digen.environment.max_turns must be >= {num_turns}, the turns of an episode of {digen.environment.target}",
        most,
        "raise it, or lower the turns in digen.environment.options",
    )
    no_share = ": episodes with instructions of their own share no steps"
    run.require_values(
        f"with {digen.environment.key}",
        (f"{SECTION}.default_agent_loop", SINGLE_TURN, ", which has an agent loop of its own", "leave it out"),
        NO_LOOP,
        ("digen.branches.splits", (), no_share, "leave it out"),
    )
    _check_training(digen)
    longest_s = (1 + most) * digen.environment.step_timeout_s
    require(
        run.config.trainer.v1.trainer_mode == COLOCATED or digen.deadlines.answer_s >= longest_s,
        "digen.deadlines.answer_s must be >= (1 + digen.environment.max_turns) x digen.environment.step_timeout_s, "
        f"which is {longest_s:g} s: a chunk's time on a replica includes its environments",
        digen.deadlines.answer_s,
        "raise it, or lower digen.environment.step_timeout_s",
    )
    _check_model(run, edits=found.edits)


def _check_training(digen: DigenConfig) -> None:
    """Require an objective of single rows, and rewards of single samples that are scored at once."""
    key, reward = digen.environment.key, digen.reward
    objective = find_objective(digen.loss_name)
    require(
        objective.joint is None and objective.source == "policy",
        f"digen.loss.name must be a loss of single rows with {key}: the samples of a group have points of prompts of "
        "their own, and not equally many",
        digen.loss_name,
        "choose e.g. flow_grpo or diffusion_nft",
    )
    require(
        not reward.timeshared,
        f"digen.reward.functions must have no entry with timeshare=true with {key}, whose replicas wait for it",
        [entry.name for entry in reward.timeshared],
        "give the reward num_gpus of its own",
    )


def _check_model(run: StartConfig, *, edits: bool) -> None:
    """Require a model that reads as many images as the instructions carry."""
    key = run.digen.environment.key
    if edits:
        remedy = "set it to 1, or choose an environment whose `edits` is false"
        run.require_values(f"with {key}", ("digen.sampling.num_frames", 1, ", which edits pictures", remedy))
    if not has_checkpoint(run.config):  # fetched once the run has started
        return
    least, most = load_configs(run.config.actor_rollout_ref.model.path).spec.num_images
    require(
        (most > 0) if edits else (least == 0),
        f"{key} must name an environment {'of text' if most == 0 else 'that edits'} with this model, which reads "
        f"{least} to {most} images",
        run.digen.environment.target,
        "choose a model or an environment that fits; `Environment.edits` says what one does",
    )
