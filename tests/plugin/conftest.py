# SPDX-License-Identifier: Apache-2.0
"""Compose the config of verl's main, in this process or in its own."""

from __future__ import annotations

import os
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import verl  # noqa: F401 - loads the plugin
import verl.plugin.platform as platforms
from hydra import compose, initialize_config_module
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from tests.local_ray import shared_server

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_main() -> Compose:
    """`compose_main("recipe=NAME", "key=value")` -> the config, with Hydra's own section."""

    def run(*overrides: str) -> DictConfig:
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=list(overrides), return_hydra_config=True)

    return run


@pytest.fixture(scope="session")
def start() -> Compose:
    """`start("recipe=NAME", "key=value")` -> what `compose_main` makes, a few times as fast: the config of every
    `recipe=` is composed once per platform, and Hydra applies the other overrides to a copy of it."""
    composed: dict[tuple[str, ...], bytes] = {}

    def run(*overrides: str) -> DictConfig:
        recipes = tuple(word for word in overrides if word.startswith("recipe="))
        key = (platforms.get_platform().device_name, *recipes)  # recipes hold what the platform's machine needs
        if key not in composed:
            with initialize_config_module("verl.trainer.config", version_base=None):
                config = compose("ppo_trainer", overrides=list(recipes), return_hydra_config=True)
            composed[key] = pickle.dumps(config)
        config = pickle.loads(composed[key])  # five times as fast as a copy
        others = [word for word in overrides if word not in recipes]
        ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(others), config)
        OmegaConf.update(config, "hydra.overrides.task", list(overrides))
        return config

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
        "digen.reward.recipe_functions={jpeg_compressibility: 1.0}",
    ]


def start_main(*args: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """`python -m verl.trainer.main_ppo args`, in the background, in a fork that has PyTorch imported: about 1 s."""
    command = [shared_server().python, "-m", "verl.trainer.main_ppo", *args]
    return subprocess.Popen(
        command, cwd=cwd, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
