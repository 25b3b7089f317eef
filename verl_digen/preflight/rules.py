# SPDX-License-Identifier: Apache-2.0
"""All rules, how they are run, which of them a plan runs; and the notes that a run prints once, before it starts.

A plan is made before prompts, rewards and weights are there, and on another machine than the run. So it checks prompts
and rewards only where they are named, and neither the weights, nor the run's folders, nor the packages of a replica or
of a weight update.
"""

import pickle
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, flag_override
from omegaconf.errors import InterpolationToMissingValueError, MissingMandatoryValue, OmegaConfBaseException

from verl_digen.algorithms.solvers import FIRST_ORDER, SCHEDULERS
from verl_digen.config import DigenConfig, SamplingConfig, digen_config
from verl_digen.config.sampling import unused_settings
from verl_digen.data.prompts import describe_dropped
from verl_digen.preflight import (
    adapter,
    agent_loop,
    inputs,
    kernels,
    machine,
    model,
    pools,
    rewards,
    run_folder,
    unread,
    values,
    verl_keys,
    weights,
)
from verl_digen.preflight.start_config import StartConfig, check_recipes
from verl_digen.reward.named import has_custom
from verl_digen.types import PromptRow

Rule = Callable[[StartConfig], list[str] | None]
"""Raises ValueError for a problem, or returns several."""


CONFIG, CHECKPOINT, MACHINE, REWARDS = "config", "checkpoint", "machine", "rewards"
"""Kinds of rules, by what they read: the composed config alone; the checkpoint's configs; the machine of the run; the
rewards that train, without which they have nothing to check."""
RULES: Mapping[Rule, str] = {
    machine.check_versions: CONFIG,
    verl_keys.check_plugin: CONFIG,
    verl_keys.check_digen: CONFIG,
    pools.check_device: CONFIG,
    machine.check_machine: MACHINE,
    machine.check_address: MACHINE,
    machine.check_cpus: MACHINE,
    machine.check_trackers: CONFIG,
    unread.unknown_problems: CONFIG,
    values.unused_problems: CONFIG,
    verl_keys.check_batches: CONFIG,
    verl_keys.check_shards: CONFIG,
    kernels.check_precision: CONFIG,
    verl_keys.check_optimizer: CONFIG,
    verl_keys.check_callback: CONFIG,
    pools.check_mode: CONFIG,
    pools.check_rollout: CONFIG,
    pools.check_rollout_package: MACHINE,
    pools.check_vllm_omni: CHECKPOINT,
    pools.check_weight_path: CONFIG,
    pools.check_weight_package: MACHINE,
    kernels.check_kernels: CONFIG,
    kernels.check_kernel_machine: MACHINE,
    pools.check_pools: CONFIG,
    unread.effect_problems: CONFIG,
    pools.check_placement: CONFIG,
    verl_keys.check_classes: CONFIG,
    run_folder.check_run_dir: MACHINE,
    run_folder.check_resume: MACHINE,
    model.check_model: CHECKPOINT,
    kernels.check_kernel_model: CHECKPOINT,
    weights.check_weights: MACHINE,
    model.check_model_section: CHECKPOINT,
    adapter.check_adapter: CHECKPOINT,
    inputs.check_prompts: CONFIG,
    inputs.check_validation: CONFIG,
    model.check_loss: CONFIG,
    adapter.check_teacher: CONFIG,
    inputs.check_pairs: CONFIG,
    agent_loop.check_agent_loop: CONFIG,
    agent_loop.check_branches: CONFIG,
    pools.check_outside: CONFIG,
    pools.check_generating_ranks: CONFIG,
    agent_loop.check_environment: CONFIG,
    rewards.check_reward_keys: CONFIG,
    rewards.check_rewards: REWARDS,
    rewards.check_reward_model: REWARDS,
    rewards.check_latents: CONFIG,
    rewards.check_combination: REWARDS,
    rewards.check_group_rewards: CONFIG,
    rewards.check_reward_manager: CONFIG,
    rewards.check_reward_devices: CONFIG,
    rewards.check_timeshared: CONFIG,
    rewards.check_watching: REWARDS,
    run_folder.check_continued: MACHINE,
}
"""Rule -> its kind, in the order in which their messages are shown, after the messages of `values`."""


def check(config: DictConfig, rules: Iterable[Rule] = RULES) -> StartConfig:
    """Apply `rules`, all by default -> the run, which may start. ValueError: the messages of all rules that are broken,
    one line each.

    Recipes that do not go together are reported alone: everything else follows from them. A rule that reads a value of
    the wrong type or range is left out: the value's own message says what is wrong.
    """
    check_recipes(config)
    wrong = values.value_problems(config)
    problems = [problem for problem in wrong.values() if problem is not None]
    # reading a wrong value raises MissingMandatoryValue
    run = StartConfig(_with(config, dict.fromkeys(wrong, "???")) if wrong else config)
    with flag_override(run.config, "readonly", True):
        for rule in rules:
            if problems and rule is run_folder.check_continued:  # a mistyped value is no other run
                continue
            try:
                problems += rule(run) or []
            except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that leads nowhere
                is_missing = isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError)
                if not (is_missing and any(key in str(error) or error.full_key == key for key in wrong)):
                    problems.append(_told(error))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys("\n".join(problems).splitlines())))
    return run


def _told(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    return f"{error.full_key} must have a value: {first}; set it" if error.full_key else first


def _with(config: DictConfig, values: Mapping[str, str]) -> DictConfig:
    """A copy with other values of some keys."""
    changed = pickle.loads(pickle.dumps(config))  # faster than a copy
    with flag_override(changed, ["struct", "readonly"], False):
        for key, value in values.items():
            OmegaConf.update(changed, key, value, merge=False, force_add=True)
    return changed


def check_plannable(config: DictConfig) -> None:
    """Run the rules that need no checkpoint. Raises ValueError: the messages that a run would be refused with."""
    kinds = {CONFIG, REWARDS} if digen_config(config).reward.entries or has_custom(config) else {CONFIG}
    has_prompts = OmegaConf.select(config, "data.train_files") is not None
    rules = [rule for rule, kind in RULES.items() if kind in kinds]
    check(config, [rule for rule in rules if has_prompts or rule is not inputs.check_prompts])


def check_plannable_model(config: DictConfig, folder: Path) -> None:
    """Run the rules that read the configs of the checkpoint in `folder`. Raises as `check_plannable`."""
    local = _with(config, {"actor_rollout_ref.model.path": str(folder)})
    check(local, [rule for rule, kind in RULES.items() if kind == CHECKPOINT])


WORDS_OF_SETTINGS = frozenset(
    {
        *("height", "width", "size", "resolution", "aspect", "ratio", "seed", "generator", "steps", "frames", "fps"),
        *("duration", "length", "guidance", "cfg", "scheduler", "sampler", "strength", "negative", "neg"),
    }
)
"""Words in names of columns that look like settings of a sample."""
MEDIA_MARK = re.compile(r"<\|?(image|img|video|audio|vision)\w*\|?>|\[img\]", re.IGNORECASE)
"""Places of images in a text, as language models' data sets have them."""


def notes(run: StartConfig) -> list[str]:
    """One sentence per note on a config that passed all checks."""
    found = [*run_folder.continue_notes(run), rewards.reward_formula(run)]
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
    found += kernels.kernel_notes(run)
    found += kernels.precision_notes(config, digen)
    found += adapter.adapter_notes(run)
    found += machine.tracker_notes(config)
    sharing = config.actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size
    if config.trainer.n_gpus_per_node % sharing:
        found.append(
            f"actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size={sharing} does not divide "
            f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: ranks that share a row lie on two nodes and "
            "exchange every attention's tokens over the network"
        )
    sets = [inputs.prompts_of(run, part) for part in ("train", "val")]
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
    names = sorted({str(name) for row in rows for name in row.extra})
    words = [re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_") for name in names]
    if columns := [name for name, own in zip(names, words, strict=True) if not WORDS_OF_SETTINGS.isdisjoint(own)]:
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
    found = model.model_of(config)
    if found is None:
        return []
    scheduler = found.scheduler
    named, chosen = SCHEDULERS.get(scheduler), digen.sampling.val_solver
    if named == chosen or (named in FIRST_ORDER and chosen in FIRST_ORDER):
        return []
    remedy = f"; digen.sampling.val_solver={named} is its solver" if named else ""
    return [
        f"the checkpoint names {scheduler}: its sigmas are used, in training with digen.sampling.solver="
        f"{digen.sampling.solver} and in validation with digen.sampling.val_solver={chosen}{remedy}"
    ]
