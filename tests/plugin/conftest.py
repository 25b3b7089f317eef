# SPDX-License-Identifier: Apache-2.0
"""Compose the config of verl's main, in this process or in its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import verl  # noqa: F401 - loads the plugin
from hydra import compose, initialize_config_module
from omegaconf import DictConfig

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_main() -> Compose:
    """`compose_main("recipe=NAME", "key=value")` -> the config, with Hydra's own section."""

    def run(*overrides: str) -> DictConfig:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=list(overrides), return_hydra_config=True)

    return run


@pytest.fixture
def runnable(tiny_qwen_image: Path, tmp_path: Path) -> list[str]:
    """Overrides of a small config that passes all checks."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(8)))
    return [
        "recipe=digen_flowgrpo",
        f"actor_rollout_ref.model.path={tiny_qwen_image}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "actor_rollout_ref.rollout.n=4",
        "digen.sampling.height_px=32",
        "digen.sampling.width_px=32",
        "digen.reward.functions.jpeg_compressibility=1.0",
    ]


def start_main(*args: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """`python -m verl.trainer.main_ppo args`, in the background; takes about 6 s."""
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *args]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
