# SPDX-License-Identifier: Apache-2.0
"""Rules for multi-turn environments (`digen.environment`)."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.agent_loop import SECTION
from verl_digen.preflight.pools import COLOCATED
from verl_digen.require import require
from verl_digen.reward.named import scope_of


def check_environment(config: DictConfig) -> None:
    """Require an environment that can be made, and a run whose every part knows episodes."""
    from verl_digen.environments.registry import environment_class, environment_settings

    digen = digen_config(config)
    if not digen.environment.is_on:
        return
    require(
        digen.rollout.encoders != "before",
        "digen.rollout.encoders must not be before with an environment, whose prompts are made during the run",
        digen.rollout.encoders,
        "set it to host",
    )
    found = environment_class(digen.environment)
    settings, most = environment_settings(digen.environment, found), digen.environment.max_turns
    num_turns = found.num_turns(settings)
    require(
        num_turns is None or num_turns <= most,
        f"digen.environment.max_turns must be >= {num_turns}, the turns of an episode of {digen.environment.target}",
        most,
        "raise it, or lower the turns in digen.environment.options",
    )
    _check_generation(config, digen)
    _check_training(digen)
    _check_pools(config, digen)
    _check_model(config, digen, edits=found.edits)


def _check_generation(config: DictConfig, digen: DigenConfig) -> None:
    key, rollout = digen.environment.key, config.actor_rollout_ref.rollout
    require(
        rollout.agent.default_agent_loop == "diffusion_single_turn",
        f"{SECTION}.default_agent_loop must be diffusion_single_turn with {key}, which has an agent loop of its own",
        rollout.agent.default_agent_loop,
        "leave it out",
    )
    require(
        digen.tag.policy == "off",
        f"digen.tag.policy must be off with {key}, because trainer ranks generate without an agent loop",
        digen.tag.policy,
        "set digen.tag.policy=off",
    )
    require(
        not digen.branches.splits,
        f"digen.branches.splits must be [] with {key}: episodes with instructions of their own share no steps",
        list(digen.branches.splits),
        "leave it out",
    )


def _check_training(digen: DigenConfig) -> None:
    """Require an objective of single rows, and rewards of single samples that are scored at once."""
    key, reward = digen.environment.key, digen.reward
    if digen.loss_name in objective_names():
        objective = find_objective(digen.loss_name)
        require(
            objective.joint is None and objective.source == "policy",
            f"digen.loss.name must be a loss of single rows with {key}: the samples of a group have points of "
            "prompts of their own, and not equally many",
            digen.loss_name,
            "choose e.g. flow_grpo or diffusion_nft",
        )
    require(
        reward.combine != "gdpo",
        f"digen.reward.combine must not be gdpo with {key}, whose reward has no weight",
        reward.combine,
        "leave it out",
    )
    require(
        not reward.timeshared,
        f"digen.reward.functions must have no entry with timeshare=true with {key}, whose replicas wait for it",
        [entry.name for entry in reward.timeshared],
        "give the reward num_gpus of its own",
    )


def _check_pools(config: DictConfig, digen: DigenConfig) -> None:
    environment, mode = digen.environment, config.trainer.v1.trainer_mode
    of_groups = [entry.key for entry in digen.reward.entries if scope_of(entry) == "group"]
    require(
        environment.extra_episodes == 0 or not of_groups,
        f"digen.environment.extra_episodes must be 0 with {', '.join(of_groups)}, which scores a whole group",
        environment.extra_episodes,
        "leave it out",
    )
    if mode == COLOCATED:
        return
    require(
        environment.extra_episodes == 0,
        "digen.environment.extra_episodes must be 0 on separate pools",
        environment.extra_episodes,
        "digen.queue.extra_prompts begins further groups there",
    )
    require(
        digen.deadlines.generate_s >= environment.longest_s,
        "digen.deadlines.generate_s must be >= (1 + digen.environment.max_turns) x digen.environment.step_timeout_s, "
        f"which is {environment.longest_s:g} s: a chunk's time on a replica includes its environments",
        digen.deadlines.generate_s,
        "raise it, or lower digen.environment.step_timeout_s",
    )


def _check_model(config: DictConfig, digen: DigenConfig, *, edits: bool) -> None:
    """Require a model that reads as many images as the instructions carry."""
    from verl_digen.models import load_model

    key = digen.environment.key
    require(
        not edits or digen.sampling.num_frames == 1,
        f"digen.sampling.num_frames must be 1 with {key}, which edits pictures",
        digen.sampling.num_frames,
        "set it to 1, or choose an environment whose `edits` is false",
    )
    folder = Path(config.actor_rollout_ref.model.path).expanduser()
    if not folder.is_dir():  # fetched once the run has started
        return
    least, most = load_model(folder).spec.num_images
    require(
        (most > 0) if edits else (least == 0),
        f"{key} must name an environment {'of text' if most == 0 else 'that edits'} with this model, which reads "
        f"{least} to {most} images",
        digen.environment.target,
        "choose a model or an environment that fits; `Environment.edits` says what one does",
    )
