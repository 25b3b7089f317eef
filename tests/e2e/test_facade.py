# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one's own that constructs verl's RayPPOTrainer, with our subclass in its place."""

import subprocess

import pytest

from tests.e2e.conftest import SMALL, Run
from tests.fork_server import shared_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PIPELINE = """
import sys

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_digen.facade import RayFlowGRPOTrainer

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
OmegaConf.resolve(config)
ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
trainer = RayFlowGRPOTrainer(config)
trainer.init_workers()
trainer.fit()
"""


def test_a_pipeline_that_swaps_in_our_trainer_trains(tmp_path):
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    run_dir = tmp_path / "run"
    overrides = ["recipe=digen_flowgrpo", *SMALL, f"trainer.default_local_dir={run_dir}"]
    done = subprocess.run(
        [shared_server().python, "-m", "pipeline", *overrides, "trainer.total_training_steps=2"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert [row["step"] for row in Run(0, done.stdout, run_dir).metrics] == [1, 2]
