# SPDX-License-Identifier: Apache-2.0
"""A reward that takes turns with the replicas on the trainer's devices."""

import pytest

from tests.e2e.conftest import assert_succeeded, run_main
from verl_digen.observe.timeline.file import read_timeline

pytestmark = [pytest.mark.e2e, pytest.mark.long]

REWARDS = """
import os
from pathlib import Path

import torch

from verl_digen.reward.base import Reward

FIRST = Path(__file__).with_name("first")


class Net(Reward):
    def __init__(self, config, device):
        super().__init__(config, device)
        torch.manual_seed(0)
        self.net = torch.nn.Linear(3, 1).to(device)
        self.is_awake = True

    def sleep(self):
        super().sleep()
        self.is_awake = False

    def wake(self):
        super().wake()
        self.is_awake = True

    def score(self, batch):
        if not self.is_awake:
            raise RuntimeError("scored while asleep")
        means = [torch.from_numpy(sample.pixels).float().mean((0, 1)) / 255 for sample in batch]
        return [self.net(mean).item() for mean in means]


class FailsOnce(Net):
    '''Has no score for the training group that it meets first.'''

    def score(self, batch):
        for sample in batch:
            if not sample.is_validation:
                try:
                    with open(FIRST, "x") as file:
                        file.write(sample.row.uid)
                except FileExistsError:
                    pass
                if FIRST.read_text() == sample.row.uid:
                    raise ValueError("no score for this group")
        return super().score(batch)
"""


def test_a_timeshared_reward_scores_as_one_with_its_own_processes_and_never_beside_replicas_or_training(tmp_path):
    """A group that has no score in step 1 makes the replicas generate again after the others are scored."""
    source = tmp_path / "rewards.py"
    source.write_text(REWARDS)
    run = run_main(
        tmp_path / "run",
        f"digen.reward.functions={{shared: {{weight: 1.0, reward: '{source}:FailsOnce', timeshare: true}}, "
        f"own: {{weight: 0.0, reward: '{source}:Net'}}}}",
        "digen.reward.max_retries=0",
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=true",
        "trainer.test_freq=2",
    )
    assert_succeeded(run)
    validations = [found for found in run.metrics if "val/reward_own" in found]
    assert len(validations) == 2
    for found in validations:
        assert found["val/reward_shared"] == pytest.approx(found["val/reward_own"], abs=1e-7)
    steps = [found for found in run.metrics if "reward/own" in found]
    assert [found["rollout/refilled_groups"] for found in steps] == [1.0, 0.0]
    for found in steps:
        assert found["reward/shared"] == pytest.approx(found["reward/own"], abs=1e-7)
        assert found["reward_calls/shared_wake_s"] > 0 and found["reward_calls/shared_sleep_s"] > 0
        # the replicas that were woken again within the step have the weights that the trainer has
        assert found["rollout/log_prob_gap_max"] <= 1e-4
    timeline = read_timeline(run.run_dir / "timeline.jsonl")
    assert timeline.steps == [1, 2]
    # validation, step 1 with its replaced group, step 2, validation; a process on each of the two devices
    turns = []
    for process in (0, 1):
        changes = [one for one in timeline.intervals if one.detail.get("process") == process]
        assert [one.kind for one in changes] == ["wake", "sleep"] * 6
        turns += list(zip(changes[::2], changes[1::2], strict=True))
    for one in timeline.intervals:
        if one.kind in ("generate", "train"):
            assert not any(one.start_s < slept.end_s and woken.start_s < one.end_s for woken, slept in turns), one
        if one.kind == "score" and one.detail["reward"] == "shared":
            assert any(woken.end_s <= one.start_s and one.end_s <= slept.start_s for woken, slept in turns), one
    # the devices' own lane repeats what the replicas say
    first = [one for one in timeline.intervals if one.step == 1 and one.detail.get("process", 0) == 0]
    kinds = [one.kind for one in first if (one.kind, one.lane.pool) != ("generate", "trainer")]
    order = [kind for kind in kinds if kind in ("generate", "wake", "sleep", "train")]
    last = [*("generate",) * 3, "wake", "sleep", "generate", "wake", "sleep", "train"]
    assert order[order.index("generate") :] == last, order
