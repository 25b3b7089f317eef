# SPDX-License-Identifier: Apache-2.0
"""The mode with verl-omni's settings: our config accepts them."""

from pathlib import Path

import pytest

from verl_digen.bench.command import RECIPE, compose_bench
from verl_digen.config import digen_config

FOLDERS = (Path(__file__).resolve().parents[3] / "examples" / "research",)
pytestmark = pytest.mark.usefixtures("examples")


def test_its_settings_are_accepted_and_are_those_of_the_published_recipe():
    from peer import peer_mode

    config = compose_bench((RECIPE,), peer_mode().overrides)
    digen = digen_config(config)
    assert (digen.tsp.extents, digen.tsp.reduce) == ((16, 1), "tile")
    assert digen.old_log_probs == "recompute" and digen.rollout.max_batch_size == 1
    actor = config.actor_rollout_ref.actor
    assert config.data.train_batch_size == 2 * actor.ppo_mini_batch_size and actor.ppo_epochs == 1
