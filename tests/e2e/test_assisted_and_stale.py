# SPDX-License-Identifier: Apache-2.0
"""Trainer-assisted generation through verl's own main."""

import signal

import pytest

from tests.e2e.conftest import SEPARATE, Run, assert_same_weights, assert_succeeded, run_main, steps_of
from tests.e2e.moments import interfere_with_runs
from tests.weight_change import SGD
from verl_digen.observe.timeline import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.grid]

ASSISTED = (
    *SGD,
    "trainer.total_training_steps=3",
    "trainer.save_freq=1",
    "digen.tag.policy=always",
    "digen.tag.chunk_size=6",  # of two groups, where neither is begun
    "digen.gap.chunk_size=1",  # a replica that takes few samples at a time leaves most of a batch to the trainer
)


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
