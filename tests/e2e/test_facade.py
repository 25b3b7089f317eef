# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one's own that constructs verl's RayPPOTrainer, with our subclass in its place."""

import inspect
import re
import subprocess

import pytest

from tests.contracts.test_verl_is_unchanged import replaced
from tests.e2e.conftest import SMALL, Run
from tests.fork_server import shared_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PIPELINE = """
import sys

import ray
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from verl_digen.facade import RayFlowGRPOTrainer


{replaced}

with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides=sys.argv[1:])
OmegaConf.resolve(config)
ray.init(**OmegaConf.to_container(config.ray_kwargs.ray_init))
trainer = RayFlowGRPOTrainer(config)
trainer.init_workers()
trainer.fit()
inner = trainer._trainer
servers = [replica.server_handle for replica in inner.checkpoint_manager.replicas]
actors = [*inner.actor_rollout_wg.workers, *servers, *inner.agent_loop_manager.agent_loop_workers]
found = ray.get([actor.__ray_call__.remote(lambda self: replaced()) for actor in actors])
print(f"{{type(inner).__name__}} replaced {{[replaced(), *found]}} in {{len(found)}} actors")
"""


@pytest.mark.parametrize(
    ("recipe", "trainer"),
    [("digen_flowgrpo", "ColocatedTrainer"), ("digen_flowgrpo+disaggregated", "DisaggregatedTrainer")],
)
def test_a_pipeline_that_swaps_in_our_trainer_trains_and_replaces_nothing_of_verl(tmp_path, recipe, trainer):
    (tmp_path / "pipeline.py").write_text(PIPELINE.format(replaced=inspect.getsource(replaced)))
    run_dir = tmp_path / "run"
    overrides = [f"recipe={recipe}", *SMALL, f"trainer.default_local_dir={run_dir}"]
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
    said = re.search(rf"{trainer} replaced (.*) in (\d+) actors", done.stdout)
    assert said is not None and eval(said[1]) == [[]] * (int(said[2]) + 1) and int(said[2]) >= 3, said
