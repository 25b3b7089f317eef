# SPDX-License-Identifier: Apache-2.0
"""Rules for objectives with a teacher (`digen.loss.teacher`)."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import digen_config
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
        _check_files(config.actor_rollout_ref.model, settings.taught_by, digen)


def _check_files(section: DictConfig, teacher: str, digen: Any) -> None:
    """Compare the folder with the adapter that the run would train."""
    import torch

    from verl_digen.engine.build import add_adapter
    from verl_digen.engine.teacher import adapter_shapes, check_teacher_files
    from verl_digen.model_config import DiffusionModelConfig
    from verl_digen.preflight.model import load_configs

    given: Any = OmegaConf.to_container(section, resolve=True, throw_on_missing=True)
    given.pop("_target_", None)
    model_config = DiffusionModelConfig(**given | {"digen": digen})
    network = load_configs(section.path).load_transformer(torch.float32, meta=True)
    with torch.device("meta"):
        adapted = add_adapter(network, model_config, rank=1)
    check_teacher_files(teacher, adapter_shapes(adapted))
