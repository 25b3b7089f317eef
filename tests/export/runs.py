# SPDX-License-Identifier: Apache-2.0
"""Run folders with checkpoints of the tiny Qwen-Image, as the trainer leaves them."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from omegaconf import OmegaConf

from tests.engine.harness import digen_section, make_batch, make_engine, perturb, train
from verl_digen.cli import main
from verl_digen.engine.driver_checkpoint import DriverState, publish, save_driver_state, save_run_description
from verl_digen.engine.engine import DiffusersFSDPEngine

EMA = {"ema": {"enable": True, "every_steps": 1}}
STEP = 2


def trained_engine(path: Path, model: dict[str, Any], **options: Any) -> DiffusersFSDPEngine:
    """An engine after two updates from weights of which none is zero; it keeps an average."""
    engine = make_engine(path, model=model, digen=EMA, **options)
    perturb(engine)
    train(engine, make_batch(path, group_size=2), 2)
    return engine


def save_run(
    engine: DiffusersFSDPEngine, folder: Path, path: Path, model: dict[str, Any], step: int = STEP, **digen: Any
) -> None:
    """Write a checkpoint as the trainer does: the engine's part, the driver's, and the pointer.

    Args:
        digen: changes of that section.
    """
    step_dir = folder / f"global_step_{step}"
    engine.save_checkpoint(str(step_dir / "actor"))
    if dist.get_rank() == 0:
        save_driver_state(step_dir, DriverState(2, ""), {}, [])
        save_run_description(step_dir, OmegaConf.create(run_config(path, model, **digen)))
        publish(folder, step)


def run_config(path: Path, model: dict[str, Any], **digen: Any) -> dict[str, Any]:
    """The part of a run's config that an export reads."""
    section = digen_section(**EMA, rollout={"latents_dtype": "float32", "max_batch_size": 2}, **digen)
    target = "verl_digen.model_config.DiffusionModelConfig"
    return {
        "actor_rollout_ref": {
            "model": {"_target_": target, "path": str(path), "digen": "${digen}", **model},
            "rollout": {"dtype": "float32"},
        },
        "digen": section,
    }


def digen(*words: Any) -> int:
    """Exit code of the command `digen`."""
    return main([str(word) for word in words])
