# SPDX-License-Identifier: Apache-2.0
"""Metrics of a validation."""

from tests.tags import make_tag
from verl_digen.trainer.validation import validation_metrics


def test_a_validation_counts_what_failed_and_has_the_mean_reward_of_all_and_of_each_source():
    facts = [(0.5, "drawbench"), (1.5, "drawbench"), (4.0, "ocr"), (0.0, "ocr"), (1.0, "ocr")]
    tags = {
        f"val-{index:05d}_0_7": make_tag(reward, version=7, data_source=source)
        for index, (reward, source) in enumerate(facts)
    }
    found = validation_metrics(tags, num_samples=6)
    assert found["val/reward"] == 1.4 and found["val/failed_samples"] == 1
    assert (found["val/drawbench/reward"], found["val/ocr/reward"]) == (1.0, 5 / 3)
    one_source = validation_metrics(dict(list(tags.items())[:2]), num_samples=2)
    assert one_source["val/reward"] == 1.0 and "val/drawbench/reward" not in one_source
