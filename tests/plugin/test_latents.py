# SPDX-License-Identifier: Apache-2.0
"""Rewards of latents: samples that carry none are refused before the start."""

import pytest

from verl_digen.preflight.rewards import check_latents

READS = "digen.reward.functions={drm: {weight: 1, reward: server, protocol: drm_latents, url: 'http://h:1'}}"
SEES = "digen.reward.functions={shapes: 1.0}"


def test_latents_need_replicas_that_make_every_sample(start):
    check_latents(start("recipe=digen_flowgrpo+disaggregated", READS, "digen.tag.policy=off"))
    check_latents(start("recipe=digen_flowgrpo+disaggregated", SEES, "digen.tag.policy=always"))
    with pytest.raises(ValueError, match=r"digen.tag.policy must be off with digen.reward.functions.drm, .*got 'bts'"):
        check_latents(start("recipe=digen_flowgrpo+disaggregated", READS, "digen.tag.policy=bts"))
