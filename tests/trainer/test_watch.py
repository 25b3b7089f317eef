# SPDX-License-Identifier: Apache-2.0
"""Gold rewards of validations in a run: what is logged, when the run stops, which checkpoints are kept, and resumes."""

from pathlib import Path

import pytest

from verl_digen.config import RewardConfig
from verl_digen.reward.hacking import Rules
from verl_digen.trainer.watch import RewardWatch

RULES = Rules(least=3, window=5, threshold=1.0, patience=2)
FUNCTIONS = {"jpeg_compressibility": 1.0, "pick": {"weight": 0, "gold": True}}
REWARDS, GOLDS = [0.1, 0.2, 0.3, 0.4, 0.5], [0.8, 0.9, 0.7, 0.6, 0.5]


def make_watch(run_dir: Path, *, stops: bool = True) -> RewardWatch:
    return RewardWatch(RewardConfig(FUNCTIONS, stop_on_hacking=stops), run_dir, RULES)


def row_of(number: int) -> dict[str, float]:
    """Metrics of the validation after 10 x `number` steps."""
    return {"step": 10 * number, "val/reward": REWARDS[number], "val/reward_pick": GOLDS[number]}


def validate(watch: RewardWatch, run_dir: Path, number: int) -> tuple[dict[str, float], bool]:
    """A validation; each but the first is saved before."""
    if number > 0:
        (run_dir / f"global_step_{10 * number}").mkdir(exist_ok=True)
    return watch.observe(10 * number, row_of(number))


def test_a_run_is_warned_then_stopped_and_told_where_the_best_is(tmp_path, caplog):
    watch = make_watch(tmp_path)
    found = [validate(watch, tmp_path, number) for number in range(5)]
    assert [metrics["hacking/warning"] for metrics, _ in found] == [0, 0, 0, 1, 1]
    assert [metrics["hacking/verdict"] for metrics, _ in found] == [0, 0, 0, 0, 1]
    assert [stops for _, stops in found] == [False] * 4 + [True]
    last, _ = found[-1]
    assert (last["hacking/pick_best"], last["hacking/pick_best_step"]) == (0.9, 10.0)
    assert last["hacking/reward_trend"] > 1 and last["hacking/pick_trend"] < -1
    assert "hacking/pick_trend" not in found[0][0]
    first, second = (record.getMessage() for record in caplog.records)
    assert "validation after 30 steps: the reward rises (+" in first and "run ends" not in first
    place = f"(kept: {tmp_path}/global_step_10)"
    falls = f"pick falls (-2.9 standard errors) and is 0.5000, at best 0.9000 after step 10 {place}"
    assert falls in second and "the run ends here (digen.reward.stop_on_hacking=true)" in second


def test_a_run_that_does_not_stop_is_warned_alone(tmp_path, caplog):
    watch = make_watch(tmp_path, stops=False)
    assert not any(validate(watch, tmp_path, number)[1] for number in range(5))
    assert len(caplog.records) == 2 and "run ends" not in caplog.text and "kept" not in caplog.text


def test_the_best_validations_checkpoint_is_kept_and_before_training_there_is_none(tmp_path):
    watch = make_watch(tmp_path)
    assert watch.kept_checkpoints == []
    validate(watch, tmp_path, 0)
    assert watch.kept_checkpoints == []
    for number in range(1, 5):
        validate(watch, tmp_path, number)
        assert watch.kept_checkpoints == [str(tmp_path / "global_step_10" / "actor")]


@pytest.mark.parametrize("again", [False, True], ids=["trains on", "validates again"])
def test_a_resumed_run_judges_as_one_that_was_never_interrupted(tmp_path, again):
    watch, resumed = make_watch(tmp_path), make_watch(tmp_path)
    whole = [validate(watch, tmp_path, number) for number in range(5)]
    resumed.load([row_of(0), {"step": 5, "reward/mean": 0.1}, *map(row_of, range(1, 4))])
    first = 3 if again else 4
    assert [validate(resumed, tmp_path, number) for number in range(first, 5)] == whole[first:]
    assert resumed.kept_checkpoints == watch.kept_checkpoints


def test_validations_before_there_was_a_gold_reward_do_not_count(tmp_path):
    watch = make_watch(tmp_path)
    watch.load([{"step": 10, "val/reward": 0.1}, {"step": 20, "val/reward": 0.1, "val/reward_other": 0.9}])
    assert watch.kept_checkpoints == []


def test_a_validation_in_which_gold_scored_nothing_does_not_count(tmp_path, caplog):
    watch = make_watch(tmp_path)
    assert watch.observe(10, {"val/reward": 0.1}) == ({}, False)
    assert "no sample was scored by pick" in caplog.text and watch.kept_checkpoints == []
