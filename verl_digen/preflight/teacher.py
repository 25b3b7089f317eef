# SPDX-License-Identifier: Apache-2.0
"""Rules for objectives with a teacher (`digen.loss.teacher`)."""

from __future__ import annotations

from omegaconf import DictConfig

from verl_digen.config import digen_config
from verl_digen.preflight.adapter import build_on_meta, load_on_meta, model_section
from verl_digen.preflight.inputs import has_checkpoint
from verl_digen.preflight.precision import trains_all
from verl_digen.require import require


def check_teacher(config: DictConfig) -> None:
    """Require an adapter that can teach the one that trains, where the objective reads a teacher, and settings that go
    with it."""
    from verl_digen.algorithms.objectives import find_objective, objective_names
    from verl_digen.algorithms.objectives.objective import TEACHER
    from verl_digen.engine.teacher import KEY

    digen = digen_config(config)
    if digen.loss_name not in objective_names():
        return  # reported by `check_loss`
    objective, settings = find_objective(digen.loss_name), digen.loss_settings
    if TEACHER not in objective.policies_for(settings):
        return
    require(
        settings.taught_by is not None,
        f"{KEY} must be the folder of a LoRA adapter with digen.loss.name={digen.loss_name}",
        settings.taught_by,
        f"set {KEY}=FOLDER",
    )
    assert settings.taught_by is not None
    require(
        not trains_all(config),
        f"actor_rollout_ref.model.lora_rank must be that of the teacher's adapter with digen.loss.name="
        f"{digen.loss_name}, whose teacher and student are adapters of one base",
        config.actor_rollout_ref.model.lora_rank,
        "set actor_rollout_ref.model.lora_rank, and target_modules where the teacher has others",
    )
    require(
        objective.reads_advantages(settings) or not digen.queue.drop_zero_spread,
        f"digen.queue.drop_zero_spread must be false with digen.loss.name={digen.loss_name}, where a group trains "
        "whatever its rewards are",
        digen.queue.drop_zero_spread,
        "leave it out",
    )
    if has_checkpoint(config):
        _check_files(config, settings.taught_by)


def _check_files(config: DictConfig, teacher: str) -> None:
    """Compare the folder with the adapter that the run would train."""
    from verl_digen.engine.teacher import adapter_shapes, check_teacher_files

    _, network = load_on_meta(config.actor_rollout_ref.model.path)
    check_teacher_files(teacher, adapter_shapes(build_on_meta(network, model_section(config))))
