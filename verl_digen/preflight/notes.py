# SPDX-License-Identifier: Apache-2.0
"""Notes that a run prints once, before it starts: the reward's formula, and settings that may be unintended."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.algorithms.solvers import FIRST_ORDER, SCHEDULERS
from verl_digen.config import DigenConfig, digen_config
from verl_digen.config.loss import unused_settings
from verl_digen.data.lengths import describe_dropped
from verl_digen.preflight.adapter import adapter_notes
from verl_digen.preflight.inputs import prompts_of
from verl_digen.preflight.kernels import kernel_notes
from verl_digen.preflight.precision import precision_notes
from verl_digen.preflight.rewards import reward_formula


def notes(config: DictConfig) -> list[str]:
    """One sentence per note on a config that passed all checks."""
    found = [reward_formula(config)]
    digen = digen_config(config)
    if unused := unused_settings(digen.loss):
        listed = ", ".join(f"digen.loss.{name}={value}" for name, value in sorted(unused.items()))
        found.append(f"{listed}, of a recipe, is not used: digen.loss.name={digen.loss_name} has no such setting")
    if digen.branches.splits and config.actor_rollout_ref.rollout.name == "vllm_omni":
        found.append(
            f"digen.branches.splits={list(digen.branches.splits)}: vLLM-Omni runs the steps of a tree from the window "
            "on for every sample; with actor_rollout_ref.rollout.name=diffusers they run once for those that share them"
        )
    found += solver_notes(config, digen)
    found += kernel_notes(config)
    found += precision_notes(config, digen)
    found += adapter_notes(config)
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    if config.trainer.n_gpus_per_node % sharing:
        found.append(
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sharing} does not divide "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: ranks that share a row lie on two nodes and "
            "exchange every attention's tokens over the network"
        )
    for part in ("train", "val") if config.data.filter_overlong_prompts else ():
        of_part = prompts_of(config, part)
        if of_part.too_long:
            found.append(describe_dropped(f"data.{part}_files", of_part.too_long, len(of_part.prompts)))
    if config.trainer.save_freq <= 0:
        found.append(
            f"trainer.save_freq={config.trainer.save_freq}: no checkpoint will be saved, and what is learnt ends with "
            "the process; set trainer.save_freq=30 to keep it"
        )
    return found


def solver_notes(config: DictConfig, digen: DigenConfig) -> list[str]:
    """A sentence that names both solvers, or none."""
    path = config.actor_rollout_ref.model.path
    if "://" in path:  # on a remote file system: verl fetches it once the run has started
        return []
    from verl_digen.models import load_model  # imports diffusers: a start that is refused earlier needs none
    from verl_digen.models.locate import locate_configs

    scheduler = load_model(locate_configs(path)).scheduler
    named, chosen = SCHEDULERS.get(scheduler), digen.sampling.val_solver
    if named == chosen or (named in FIRST_ORDER and chosen in FIRST_ORDER):
        return []
    remedy = f"; digen.sampling.val_solver={named} is its solver" if named else ""
    return [
        f"the checkpoint names {scheduler}: its sigmas are used, in training with digen.sampling.solver="
        f"{digen.sampling.solver} and in validation with digen.sampling.val_solver={chosen}{remedy}"
    ]
