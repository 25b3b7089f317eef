# SPDX-License-Identifier: Apache-2.0
"""Trainer-assisted generation and one-step-stale generation through verl's own main."""

import signal
from collections import Counter

import pytest

from tests.e2e.conftest import SEPARATE, Run, assert_same_weights, assert_succeeded, run_main, steps_of
from tests.e2e.moments import interfere_with_runs
from tests.weight_change import SGD
from verl_digen.observe.timeline import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long]

ASSISTED = (
    *SGD,
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "digen.tag.policy=always",
    "digen.tag.chunk_size=6",  # of two groups, where neither is begun
    "digen.gap.chunk_size=1",  # a replica that takes few samples at a time leaves most of a batch to the trainer
)

SLOW_REWARD = """
import random, time

def compute_score(data_source, solution_image, ground_truth, extra_info=None, **kwargs):
    time.sleep(random.expovariate(1 / 0.05))
    return float(solution_image.mean()) / 255
"""


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """The work of `three_steps` with an assisting trainer that is killed while it assists, and the rest of it."""
    run_dir = tmp_path_factory.mktemp("e2e") / "assisted"
    with pytest.MonkeyPatch.context() as patch:
        # a replica that is as fast as the trainer may begin all of a batch before the trainer is free
        interfere_with_runs(patch, run_dir.parent, run_dir, signal.SIGKILL, sample_s=0.3, assist=2)
        killed = run_main(run_dir, *ASSISTED, recipe=SEPARATE)
        return killed, run_main(run_dir, *ASSISTED, "trainer.resume_mode=auto", recipe=SEPARATE)


def test_a_trainer_killed_while_it_assists_resumes_to_the_weights_of_a_run_without_assistance(
    three_steps, killed_and_resumed
):
    killed, resumed = killed_and_resumed
    assert killed.exit_code != 0 and (killed.run_dir / "signalled_in_assist").exists()
    assert_succeeded(resumed)
    assert_same_weights(three_steps, resumed, 3)
    assert [row["step"] for row in steps_of(resumed)] == [1, 2, 3]
    assert sum(row["tag/assisted_samples"] for row in steps_of(resumed)) > 0
    for row in steps_of(resumed):  # a replica may have begun all of a batch before the trainer is free
        assert row["rollout/version_age_max_versions"] == 0 and row["rollout/log_prob_gap_max"] <= 1e-5


def test_the_timeline_names_each_assist_and_why(killed_and_resumed):
    timeline = read_timeline(killed_and_resumed[1].run_dir / "timeline.jsonl")
    assists = [interval for interval in timeline.intervals if interval.kind == "assist"]
    assert {interval.lane.pool for interval in assists} == {"trainer"}
    assert {interval.detail["reason"] for interval in assists} == {"always"}
    assert max(len(interval.group_ids) for interval in assists) >= 2


def test_thirty_stale_steps_lose_nothing_and_stay_within_the_bound(tmp_path):
    (tmp_path / "reward.py").write_text(SLOW_REWARD)
    run = run_main(
        tmp_path / "stale",
        "trainer.total_training_steps=30",
        "trainer.save_freq=15",
        "data.train_batch_size=3",
        "actor_rollout_ref.rollout.n=2",
        "digen.sampling.num_steps=4",
        "digen.sampling.height_px=32",
        "digen.sampling.width_px=32",
        "digen.staleness.max_versions=1",
        "digen.staleness.fraction=0.67",
        "digen.tag.policy=bts",
        "digen.reward.functions={}",
        f"reward.custom_reward_function.path={tmp_path / 'reward.py'}",
        "actor_rollout_ref.rollout.n_gpus_per_node=2",
        recipe=SEPARATE,
        timeout_s=900,
    )
    assert_succeeded(run)
    steps = steps_of(run)
    assert len(steps) == 30
    ages: Counter[int] = Counter()
    for row in steps:
        assert row["batch/num_samples"] == 6 and row["batch/late_samples"] == 0
        assert row["rollout/version_age_max_versions"] <= 1
        assert row.get("staleness/samples_1_versions", 0) <= 2 * 2, "at most two of three groups"
        ages += Counter({age: int(row.get(f"staleness/samples_{age}_versions", 0)) for age in (0, 1)})
    assert ages.total() == 30 * 6 and ages[1] > 0, "the next batch did begin early"
