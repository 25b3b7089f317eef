# SPDX-License-Identifier: Apache-2.0
"""The YAML of docs/verl_job.md, after its lines are changed, is one that runs; before, each changed key is refused."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from tests.tiny_models import build_tiny
from verl_digen import preflight

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verl_job.md"
DIFF = re.compile(r"```diff\n(.*?)```", re.DOTALL)


@pytest.fixture
def checked(tmp_path):
    """`checked("+")` checks the page's YAML with its added lines, `checked("-")` with those that it drops."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"prompt {number}" for number in range(64)))
    words = [f"actor_rollout_ref.model.path={build_tiny('sd3', tmp_path / 'sd3')}"]
    words += [f"data.train_files={prompts}", f"data.val_files={prompts}"]

    def run(sign, *more):
        (lines,) = (found.splitlines() for found in DIFF.findall(PAGE.read_text()))
        (tmp_path / "my_job.yaml").write_text(
            "\n".join(line[1:] for line in lines if not line or line[0] in f" {sign}")
        )
        with initialize_config_dir(str(tmp_path), version_base=None):
            config = compose("my_job", overrides=[*words, "trainer.n_gpus_per_node=1", *more], return_hydra_config=True)
        preflight.check(config)
        return config

    return run


def test_the_changed_yaml_runs_and_keeps_its_own_values(checked):
    config = checked("+")
    assert (config.trainer.project_name, config.data.train_batch_size, config.actor_rollout_ref.rollout.n) == (
        "mine",
        64,
        8,
    )
    assert config.digen.kl.coef == 0.001 and config.actor_rollout_ref.model.lora_rank == 32, "the recipe's"


def test_what_the_page_drops_is_refused_in_one_answer(checked):
    with pytest.raises(ValueError) as refused:
        checked("-", "recipe=digen_sd3")
    keys = (
        "data.max_response_length",
        "actor_rollout_ref.model.use_remove_padding",
        "actor_rollout_ref.actor.use_kl_loss",
        "actor_rollout_ref.rollout.name",
        "actor_rollout_ref.rollout.gpu_memory_utilization",
    )
    assert [key for key in keys if f"{key} must be" not in str(refused.value)] == []
