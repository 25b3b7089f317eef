# SPDX-License-Identifier: Apache-2.0
"""Rules for objectives with teachers (`digen.loss.teachers`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from verl_digen.algorithms.objectives.teacher import KEY
from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.model import load_configs
from verl_digen.require import require, suggestion

if TYPE_CHECKING:
    from verl_digen.types import PromptRow


def check_teachers(config: DictConfig) -> None:
    """Require teachers where the objective reads one, whole files of the student's architecture in their folders, and
    settings that go with them."""
    from verl_digen.algorithms.objectives import find_objective, objective_names

    digen = digen_config(config)
    if digen.loss_name not in objective_names():
        return  # reported by `check_loss`
    objective, settings = find_objective(digen.loss_name), digen.loss_settings
    require(
        bool(settings.taught_by) or not objective.reads_teachers(settings),
        f"{KEY} must name a teacher with digen.loss.name={digen.loss_name}",
        {},
        f"set {KEY}.NAME.path=FOLDER",
    )
    if not settings.taught_by:
        return
    _check_guidance(config, digen)
    require(
        objective.reads_advantages(settings) or not digen.queue.drop_zero_spread,
        f"digen.queue.drop_zero_spread must be false with digen.loss.name={digen.loss_name} and no task, where a group "
        "trains whatever its rewards are",
        digen.queue.drop_zero_spread,
        "leave it out",
    )
    _check_files(config, digen)


def _check_guidance(config: DictConfig, digen: DigenConfig) -> None:
    guided = [
        name
        for name, teacher in digen.loss_settings.taught_by.items()
        if teacher.true_cfg_scale is not None and teacher.true_cfg_scale > 1
    ]
    name = config.actor_rollout_ref.rollout.name
    require(
        not guided or name != "vllm_omni" or digen.sampling.true_cfg_scale > 1,
        f"actor_rollout_ref.rollout.name must be diffusers with {KEY}.{guided[0] if guided else ''}.true_cfg_scale > 1 "
        "and samples without guidance: vLLM-Omni encodes no negative prompt for them",
        name,
        "set actor_rollout_ref.rollout.name=diffusers, or true_cfg_scale to 1",
    )


def _check_files(config: DictConfig, digen: DigenConfig) -> None:
    import torch

    from verl_digen.models.teacher_files import read_teacher

    section, shapes = config.actor_rollout_ref.model, None
    is_here = not OmegaConf.is_missing(section, "path") and Path(section.path).expanduser().is_dir()
    model = load_configs(section.path) if is_here else None
    for name, teacher in digen.loss_settings.taught_by.items():
        if "://" in teacher.path:
            continue  # verl fetches it later, and the engine checks it
        key = f"{KEY}.{name}.path"
        files = read_teacher(teacher.path, key, ("transformer",) if model is None else model.experts)
        if model is not None:
            if shapes is None:
                network = model.load_transformer(torch.float32, meta=True)
                shapes = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
            files.check(shapes, key)


def check_lessons(config: DictConfig, train: Sequence[PromptRow]) -> None:
    """Require one teacher for every training prompt, and prompts for every source that a teacher names.

    Raises:
        ValueError: a broken rule.
    """
    from verl_digen.algorithms.objectives import objective_names

    digen = digen_config(config)
    if digen.loss_name not in objective_names() or not (taught_by := digen.loss_settings.taught_by):
        return
    sources = sorted({prompt.data_source for prompt in train})
    for name, teacher in taught_by.items():
        unknown = [source for source in teacher.data_sources or () if source not in sources]
        require(
            not unknown,
            f"{KEY}.{name}.data_sources must name a data_source of the prompts of data.train_files, which have "
            f"{', '.join(sources)}",
            unknown,
            f"{suggestion(unknown[0], sources) if unknown else ''}take it out",
        )
    untaught = [source for source in sources if not any(teacher.teaches(source) for teacher in taught_by.values())]
    require(
        not untaught,
        "every data_source of the prompts of data.train_files must have a teacher",
        untaught,
        f"add it to {KEY}.NAME.data_sources of one, or take its prompts out of the files",
    )
