# SPDX-License-Identifier: Apache-2.0
"""A pipeline of one's own that constructs verl's RayPPOTrainer, with our subclass in its place."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from tests.contracts.test_verl_surface import replaced
from tests.e2e.conftest import CHECKPOINT, ROOT, SGD, assert_succeeded, run_main, trained_weights
from tests.local_ray import shared_server
from verl_digen.models import load_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WORDS = (*SGD, "digen.kl.coef=0.01", "trainer.total_training_steps=2", "trainer.save_freq=2")

PIPELINE = """
import hydra
import ray
from omegaconf import OmegaConf

from verl_digen.facade import RayFlowGRPOTrainer


{replaced}

@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config):
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


main()
"""


def swap_in(folder: Path, recipe: str, trainer: str) -> Path:
    """Train two steps in the pipeline, with KL -> the run's folder. Nothing of verl is replaced in any process."""
    (folder / "pipeline.py").write_text(PIPELINE.format(replaced=inspect.getsource(replaced)))
    run = run_main(folder / "run", *WORDS, recipe=recipe, main=(shared_server().python, "-m", "pipeline"))
    assert_succeeded(run)
    assert [row["step"] for row in run.metrics] == [1, 2]
    said = re.search(rf"{trainer} replaced (.*) in (\d+) actors", run.output)
    assert said is not None and eval(said[1]) == [[]] * (int(said[2]) + 1) and int(said[2]) >= 3, said
    return run.run_dir


@pytest.mark.grid
def test_a_pipeline_on_separate_pools_replaces_nothing_of_verl(tmp_path):
    swap_in(tmp_path, "digen_flowgrpo+disaggregated", "DisaggregatedTrainer")


def test_a_pipeline_that_swaps_in_our_trainer_and_the_steps_by_hand_reach_the_same_weights(tmp_path):
    """One rank; with a KL term the reference is part of the steps."""
    swapped = swap_in(tmp_path, "digen_flowgrpo", "ColocatedTrainer")
    by_hand = run_main(tmp_path / "by_hand", *WORDS, main=(shared_server().python, ROOT / "examples/by_hand.py"))
    assert_succeeded(by_hand)
    expected, found = (trained_weights(run_dir, 2) for run_dir in (swapped, by_hand.run_dir))
    start = load_model(CHECKPOINT).load_transformer(torch.float32).state_dict()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    assert max((value - start[name]).abs().max().item() for name, value in expected.items()) > 1e-4, "they moved"
