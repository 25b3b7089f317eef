# SPDX-License-Identifier: Apache-2.0
"""Rules for objectives whose samples are pairs of pictures of the data set (`offline_dpo`)."""

from __future__ import annotations

from omegaconf import OmegaConf

from verl_digen.algorithms.objectives import objective_names
from verl_digen.preflight.inputs import prompts_of, validates
from verl_digen.preflight.model import model_of
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require
from verl_digen.reward.named import has_custom


def trains_pairs(run: StartConfig) -> bool:
    """True if the run trains on pairs of pictures. False for an unknown loss, which `check_loss` reports."""
    digen = run.digen
    return digen.loss_name in objective_names() and digen.trains_pairs


def check_pairs(run: StartConfig) -> None:
    """Require replicas that encode pictures, groups of a pair, a pair in every row, and rewards that have a use."""
    if not trains_pairs(run):
        return
    rollout, loss = run.config.actor_rollout_ref.rollout, f"digen.loss.name={run.digen.loss_name}"
    require(
        rollout.name != "vllm_omni",
        f"actor_rollout_ref.rollout.name must be diffusers or trainer with {loss}, whose pictures are encoded",
        rollout.name,
        "leave out recipe vllm_omni",
    )
    of_video = ", whose pairs are pictures; a video model trains on one frame"
    run.require_values(
        f"with {loss}",
        ("actor_rollout_ref.rollout.n", 2, ": the chosen and the rejected picture of a prompt", "set it to 2"),
        ("digen.sampling.num_frames", 1, of_video, "set it to 1"),
        ("digen.tag.policy", "off", ", which leaves trainer ranks nothing to generate", "leave it out"),
    )

    if (model := model_of(run.config)) is not None:
        require(
            not model.spec.audio_parts,
            f"actor_rollout_ref.model.path must hold a model that makes no sound with {loss}, whose pairs are "
            f"pictures, and {model.spec.title} makes sound",
            run.config.actor_rollout_ref.model.path,
            "choose another model, or an objective that trains on samples of its own",
        )
    _check_rows(run, loss)
    _check_rewards(run, loss)


def _check_rows(run: StartConfig, loss: str) -> None:
    """Require a pair in every row of `data.train_files`; `check_prompts` reports files that cannot be read."""
    if OmegaConf.select(run.config, "data.train_files") is None:
        return
    prompts = prompts_of(run, "train").prompts
    bare = [prompt for prompt in prompts if not prompt.pair]
    if bare:
        raise ValueError(
            f"data.train_files: every row must have pictures in the columns chosen and rejected with {loss}, but "
            f"{bare[0].place} has none (as {len(bare)} of {len(prompts)} rows); give both, or take the rows without "
            "them out"
        )


def _check_rewards(run: StartConfig, loss: str) -> None:
    reward = run.digen.reward
    given = [entry.name for entry in reward.entries]
    given += ["reward.custom_reward_function.path"] if has_custom(run.config) else []
    require(
        not given or bool(validates(run.config)),
        f"digen.reward.functions must be empty with {loss} where the run does not validate: pairs are not scored, so "
        "none would be called",
        given,
        "set digen.reward.functions={}, or validate with trainer.test_freq=20",
    )
    require(
        reward.combine != "gdpo",
        f"digen.reward.combine must not be gdpo with {loss}, whose pairs have no rewards to normalise",
        reward.combine,
        "leave it out",
    )
