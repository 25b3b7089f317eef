# SPDX-License-Identifier: Apache-2.0
"""Notes that a run prints once, before it starts: the reward's formula, and settings that may be unintended."""

from __future__ import annotations

import re
from collections.abc import Sequence

from omegaconf import DictConfig

from verl_digen.algorithms.solvers import FIRST_ORDER, SCHEDULERS
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.config.loss import unused_settings
from verl_digen.data.prompts import describe_dropped
from verl_digen.preflight.adapter import adapter_notes
from verl_digen.preflight.inputs import prompts_of
from verl_digen.preflight.kernels import kernel_notes
from verl_digen.preflight.machine import tracker_notes
from verl_digen.preflight.model import model_of
from verl_digen.preflight.precision import precision_notes
from verl_digen.preflight.rewards import reward_formula
from verl_digen.preflight.run_folder import continue_notes
from verl_digen.preflight.start_config import StartConfig
from verl_digen.types import PromptRow

WORDS_OF_SETTINGS = frozenset(
    {
        *("height", "width", "size", "resolution", "aspect", "ratio", "seed", "generator", "steps", "frames", "fps"),
        *("duration", "length", "guidance", "cfg", "scheduler", "sampler", "strength", "negative", "neg"),
    }
)
"""Words in names of columns that look like settings of a sample."""
MEDIA_MARK = re.compile(r"<\|?(image|img|video|audio|vision)\w*\|?>|\[img\]", re.IGNORECASE)
"""Places of images in a text, as language models' data sets have them."""


def _looks_like_setting(column: str) -> bool:
    words = re.sub(r"([a-z])([A-Z])", r"\1_\2", column).lower().split("_")
    return not WORDS_OF_SETTINGS.isdisjoint(words)


def notes(run: StartConfig) -> list[str]:
    """One sentence per note on a config that passed all checks."""
    found = [*continue_notes(run), reward_formula(run)]
    config, digen = run.config, run.digen
    if unused := unused_settings(digen.loss):
        listed = ", ".join(f"digen.loss.{name}={value}" for name, value in sorted(unused.items()))
        found.append(f"{listed}, of a recipe, is not used: digen.loss.name={digen.loss_name} has no such setting")
    found += solver_notes(config, digen)
    if digen.branches.splits and config.actor_rollout_ref.rollout.name == "vllm_omni":
        found.append(
            f"digen.branches.splits={list(digen.branches.splits)}: vLLM-Omni runs the steps of a tree from the window "
            "on for every sample; with actor_rollout_ref.rollout.name=diffusers they run once for those that share them"
        )
    found += kernel_notes(run)
    found += precision_notes(config, digen)
    found += adapter_notes(run)
    found += tracker_notes(config)
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    if config.trainer.n_gpus_per_node % sharing:
        found.append(
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sharing} does not divide "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: ranks that share a row lie on two nodes and "
            "exchange every attention's tokens over the network"
        )
    sets = [prompts_of(run, part) for part in ("train", "val")]
    for of_part in sets if config.data.filter_overlong_prompts else ():
        if of_part.too_long:
            found.append(describe_dropped(f"data.{of_part.part}_files", of_part.too_long, len(of_part.prompts)))
    found += prompt_notes(digen, [row for of_part in sets for row in of_part.prompts], config.data.image_key)
    found += step_notes(config, len(sets[0].prompts) - len(sets[0].too_long))
    if config.trainer.save_freq <= 0:
        found.append(
            f"trainer.save_freq={config.trainer.save_freq}: no checkpoint will be saved, and what is learnt ends with "
            "the process; set trainer.save_freq=30 to keep it"
        )
    return found


def prompt_notes(digen: DigenConfig, rows: Sequence[PromptRow], image_key: str) -> list[str]:
    """A sentence for each part of prompts that looks like a setting, and that nothing reads."""
    found, sampling = [], digen.sampling
    if columns := sorted(filter(_looks_like_setting, {str(name) for row in rows for name in row.extra})):
        found.append(
            f"columns {', '.join(columns)} of the prompts go to the rewards alone: every sample has the sizes, steps "
            "and guidance of digen.sampling, noise from digen.seed, and what it avoids from the column negative_prompt"
        )
    negatives = sum(row.negative is not None for row in rows)
    is_given = sampling.negative_prompt != SamplingConfig().negative_prompt
    if (negatives or is_given) and sampling.true_cfg_scale == sampling.val_true_cfg_scale == 1:
        found.append(
            f"{f'negative_prompt of {negatives} prompts' if negatives else 'digen.sampling.negative_prompt'} is not "
            "read: digen.sampling.true_cfg_scale and val_true_cfg_scale are 1, without guidance"
        )
    if marked := [row for row in rows if MEDIA_MARK.search(row.text)]:
        found.append(
            f"{marked[0].place} and {len(marked) - 1} more have marks such as <image> in their text, which the model "
            f"reads as words; images belong into the column {image_key!r}"
        )
    return found


def step_notes(config: DictConfig, num_prompts: int) -> list[str]:
    """A sentence where the steps are more passes over the prompts than the config says, or fewer than the warm-up."""
    given, epochs = config.trainer.total_training_steps, config.trainer.total_epochs
    per_epoch = num_prompts // config.data.train_batch_size
    steps, optim = given or epochs * per_epoch, config.actor_rollout_ref.actor.optim
    found = []
    if steps > epochs * per_epoch:
        found.append(
            f"trainer.total_training_steps={steps} are {-(-steps // per_epoch)} passes over data.train_files: the run "
            f"takes them all, beyond trainer.total_epochs={epochs}"
        )
    if (optim.lr_warmup_steps or 0) > steps:
        found.append(
            f"actor_rollout_ref.actor.optim.lr_warmup_steps={optim.lr_warmup_steps} is more than the {steps} steps of "
            f"the run: the learning rate reaches {(steps - 1) / optim.lr_warmup_steps:.0%} of {optim.lr}"
        )
    return found


def solver_notes(config: DictConfig, digen: DigenConfig) -> list[str]:
    """A sentence that names both solvers, or none."""
    model = model_of(config)
    if model is None:
        return []
    scheduler = model.scheduler
    named, chosen = SCHEDULERS.get(scheduler), digen.sampling.val_solver
    if named == chosen or (named in FIRST_ORDER and chosen in FIRST_ORDER):
        return []
    remedy = f"; digen.sampling.val_solver={named} is its solver" if named else ""
    return [
        f"the checkpoint names {scheduler}: its sigmas are used, in training with digen.sampling.solver="
        f"{digen.sampling.solver} and in validation with digen.sampling.val_solver={chosen}{remedy}"
    ]
