# SPDX-License-Identifier: Apache-2.0
"""Rules for `actor_rollout_ref.rollout.name=vllm_omni`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import digen_config
from verl_digen.preflight.pools import COLOCATED
from verl_digen.require import require
from verl_digen.rollout.vllm_omni.settings import check_settings, check_versions

if TYPE_CHECKING:
    from verl_digen.models.spec import ModelSpec


def check_vllm_omni(config: DictConfig) -> None:
    """Require the tested versions, a replica that is tensor parallel within one node, and settings that leave the
    numbers of a step alone."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "vllm_omni" or find_spec("vllm_omni") is None:  # `check_rollout` reports that it is missing
        return
    check_versions(allow_untested=digen_config(config).rollout.allow_untested_versions)
    for name in ("data_parallel_size", "pipeline_model_parallel_size"):
        require(
            rollout[name] == 1,
            f"actor_rollout_ref.rollout.{name} must be 1 with actor_rollout_ref.rollout.name=vllm_omni, whose replicas "
            "are tensor parallel",
            rollout[name],
            "set it to 1; more devices make more replicas",
        )
    is_colocated = config.trainer.v1.trainer_mode == COLOCATED
    num_devices = (config.trainer if is_colocated else rollout).n_gpus_per_node
    require(
        rollout.tensor_model_parallel_size <= num_devices,
        f"actor_rollout_ref.rollout.tensor_model_parallel_size must be <= {num_devices}, the devices of a node, with "
        "actor_rollout_ref.rollout.name=vllm_omni",
        rollout.tensor_model_parallel_size,
        "lower it",
    )
    settings: Any = OmegaConf.select(rollout, "engine_kwargs.vllm_omni")
    if settings is not None:
        spec = _spec(config)
        check_settings(
            OmegaConf.to_container(settings, resolve=True),  # type: ignore[arg-type] - its keys are names
            is_stepwise=spec is not None and spec.vllm_omni is not None and spec.vllm_omni.is_stepwise,
        )


def _spec(config: DictConfig) -> ModelSpec | None:
    """Facts about the checkpoint's model. None where `check_model` reports that there is no checkpoint, or verl fetches
    it later."""
    from verl_digen.models import load_model
    from verl_digen.models.locate import locate_configs

    section = config.actor_rollout_ref.model
    if OmegaConf.is_missing(section, "path") or "://" in section.path:
        return None
    return load_model(Path(locate_configs(section.path))).spec
