# SPDX-License-Identifier: Apache-2.0
from tests.tags import make_tag
from verl_digen.trainer.lanes import call_intervals
from verl_digen.types import RewardCall


def test_a_call_of_a_reward_is_one_interval_on_its_own_lane_with_the_groups_it_scored():
    batch, judged, function = (RewardCall(name, 1.0, 3.0, 2, 5) for name in ("ocr", "judge", "shapes"))
    samples = {"a_0_4": make_tag(calls=(function, batch)), "b_1_4": make_tag(calls=(batch, judged))}
    found = call_intervals(samples, ["judge", "ocr"], "node-0", step=7)
    assert [(one.lane.name, one.group_ids, one.detail["reward"]) for one in found] == [
        ("reward/2", ("a", "b"), "ocr"),
        ("reward/1", ("b",), "judge"),
    ]
    first = found[0]
    assert (first.kind, first.step, first.start_s, first.end_s, first.num_samples) == ("score", 7, 1.0, 3.0, 2)
    assert first.lane.num_devices == 0 and first.detail["num_queued"] == 5
