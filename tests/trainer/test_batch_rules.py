# SPDX-License-Identifier: Apache-2.0
"""Groups of one assist: several where their samples take the same forwards, and one elsewhere."""

import pytest
from omegaconf import OmegaConf

from verl_digen.config import digen_config
from verl_digen.trainer.batch_rules import batch_rules

CHEAP = {"window": {"kind": "consecutive"}, "sampling": {"outside": {"solver_after": 0.5}, "num_steps": 10}}


@pytest.mark.parametrize(
    ("settings", "spans"),
    [
        ({}, True),
        ({"sampling": {"shared_initial_noise": True}}, True),  # windows begin at step 0
        ({"window": {"kind": "consecutive"}}, True),
        ({"window": {"kind": "consecutive"}, "sampling": {"shared_initial_noise": True}}, False),
        (CHEAP, False),
    ],
)
def test_an_assist_spans_groups_unless_their_samples_share_or_pass_over_steps(settings, spans):
    digen = digen_config(OmegaConf.create({"digen": {**settings, "tag": {"policy": "bts"}}}))
    rules = batch_rules(digen, num_prompts=4, group_size=12, num_trainer_ranks=32)
    assert rules.assist_spans_groups is spans
    assert rules.assist_sizes(8) == ((32,) if spans else (12,))
