# SPDX-License-Identifier: Apache-2.0
"""Training with vLLM-Omni as the rollout, through verl's own main."""

import time

import pytest

from tests.e2e.conftest import ROOT, Run, assert_succeeded, finish_main, kill_one, run_main, start_main, steps_of
from tests.e2e.test_edits import CASES, train_continued, train_edits
from tests.tiny_models import build_tiny

pytestmark = pytest.mark.e2e
RECIPE = "[digen_flowgrpo,vllm_omni]"
TINY_EDIT = ROOT / "examples" / "tiny_edit"
LORA = ("actor_rollout_ref.model.lora_rank=4",)


def trained_steps(run: Run, num_steps: int) -> list[dict[str, float]]:
    """Metrics of so many steps, all that there are, whose samples have the log-probs that the trainer computes."""
    assert_succeeded(run)
    steps = steps_of(run)
    assert [row["step"] for row in steps] == [*range(1, num_steps + 1)]
    assert max(row["rollout/log_prob_gap_max"] for row in steps) <= 1e-4
    return steps


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="full weights", marks=pytest.mark.grid),
        pytest.param(
            (
                *(*LORA, "digen.sampling.true_cfg_scale=2.0", "digen.sampling.val_true_cfg_scale=2.0"),
                "trainer.test_freq=2",
            ),
            id="LoRA, guidance, validation",
        ),
    ],
)
def test_two_steps_train_what_was_generated(tmp_path, overrides):
    run = run_main(tmp_path / "run", "trainer.total_training_steps=2", *overrides, recipe=RECIPE, timeout_s=600)
    for row in trained_steps(run, 2):
        assert row["rollout/version_age_max_versions"] == 0
        assert row["actor/grad_norm"] > 0
        assert row["rollout/refilled_groups"] == 0


def test_episodes_of_edits_have_one_adapter_each_on_separate_pools(tmp_path):
    run = run_main(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={TINY_EDIT / 'checkpoint'}",
        f"data.train_files={TINY_EDIT / 'prompts' / 'train.parquet'}",
        f"data.val_files={TINY_EDIT / 'prompts' / 'val.parquet'}",
        f"digen.environment.path={ROOT}/examples/drawn_world/shape_edits.py:ShapeEdits",
        "digen.reward.functions={}",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        "actor_rollout_ref.model.lora_rank=4",
        "digen.gap.chunk_size=1",
        "digen.gap.slots_per_replica=4",
        "digen.deadlines.answer_s=300",
        recipe="[digen_edit_episodes,disaggregated,vllm_omni]",
        timeout_s=600,
    )
    for row in trained_steps(run, 2):
        assert row["episodes/turns_mean"] == 3, "each turn edits the picture of the one before"


@pytest.mark.grid
def test_a_killed_replica_is_started_again_and_every_sample_trains_once(tmp_path):
    run_dir = tmp_path / "run"
    process = start_main(
        run_dir,
        "trainer.total_training_steps=5",
        "trainer.n_gpus_per_node=2",
        "digen.sampling.num_steps=40",  # long enough to be killed in the middle
        recipe=RECIPE,
    )
    metrics = run_dir / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") >= 2):
        time.sleep(0.1)
    if process.poll() is None:
        time.sleep(1.0)  # into the next step's generation
        kill_one(process, "vLLMOmniHttpServer")
    run = finish_main(process, run_dir, timeout_s=600)
    steps = trained_steps(run, 5)
    assert [row["rollout/num_restarts"] for row in steps][:2] == [0, 0] and steps[-1]["rollout/num_restarts"] == 1
    assert steps[-1]["rollout/num_replicas"] == 2, "another one took its place"
    assert "vllm_omni" in run.output and "lost" in run.output
    for row in steps:
        assert row["actor/num_rows"] == 4 * 4 * 39, "16 samples of 39 trained steps, each once"


@pytest.mark.grid
def test_a_pipeline_that_runs_in_one_go_trains_with_samples_of_the_trainer_beside_its_own(tmp_path):
    run = run_main(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={build_tiny('sd3', tmp_path / 'checkpoint')}",
        "digen.reward.functions={jpeg_compressibility: 1.0}",
        "digen.sampling.true_cfg_scale=2.0",
        "digen.tag.policy=always",
        "digen.tag.chunk_size=2",
        "trainer.total_training_steps=3",
        "trainer.test_freq=3",
        recipe="[digen_flowgrpo,disaggregated,vllm_omni]",
        timeout_s=600,
    )
    for row in trained_steps(run, 3):
        assert row["rollout/version_age_max_versions"] == 0
        assert row["actor/num_rows"] == 4 * 4 * 5, "prompts x samples x trained steps"
        assert row["tag/assisted_samples"] > 0


@pytest.mark.long
@pytest.mark.grid
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_an_edit_model_trains_on_images_of_two_shapes(case, tmp_path):
    train_edits(case, tmp_path, f"[{case.recipe.strip('[]')},vllm_omni]")


@pytest.mark.long
@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "rule", "overrides"),
    [
        ("wan2.1_i2v", "wan", ()),
        ("wan2.2_ti2v_5b", "wan_ti2v", ()),
        ("hunyuan_video15_i2v", "hunyuan_video15", ("actor_rollout_ref.model.exclude_modules='.*refiner_blocks.*'",)),
    ],
)
def test_videos_continue_images_of_two_shapes(tmp_path, name, rule, overrides):
    train_continued(tmp_path, name, rule, "[digen_flowgrpo,vllm_omni]", *overrides)
