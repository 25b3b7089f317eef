# SPDX-License-Identifier: Apache-2.0
"""Tags and statuses through a real TransferQueue, and as verl's replay buffer reads them."""

import asyncio
from dataclasses import replace

import pytest

from tests.tags import SAMPLING, make_tag
from verl_digen.algorithms.outside import Outside
from verl_digen.store.partitions import VAL
from verl_digen.store.prompts import Listing, PromptStatus, list_partition, publish_status, submit_prompts, to_listing
from verl_digen.store.samples import clear, from_batch, put_tags, to_batch
from verl_digen.store.tags import from_entry, to_entry
from verl_digen.types import RewardCall

TAG = make_tag(
    0.5,
    version=3,
    experts=(0, 1),
    parts={"a": 0.5},
    num_steps=2,
    nodes=(0, 4),
    sampling=replace(SAMPLING, outside=Outside(0.1, 3, 0.5, 0.4)),
    num_skipped_steps=5,
    calls=(RewardCall("a", 1.0, 2.0, 8, 3, (("retries", 1),)),),
)


def test_a_tag_survives_the_way_through_verls_mapping():
    entry = to_entry(TAG, step=4)
    assert from_entry(entry) == TAG
    verls = {name: value for name, value in entry.items() if name != "digen"}
    assert verls == {"status": "success", "seq_len": 1, "global_steps": 4, "min_global_steps": 3, "max_global_steps": 3}


def test_verls_batch_gives_the_tags_back():
    assert from_batch(to_batch("train", {"p0_0_3": TAG}, step=4)) == {"p0_0_3": TAG}


def test_a_sample_that_is_being_stored_has_no_tag_yet_and_is_left_out():
    entries = {"v0_0_3": to_entry(TAG, step=4), "v0_1_3": {}, "v0": {"status": "running"}}
    assert to_listing(entries) == Listing({"v0": PromptStatus("running")}, {"v0_0_3": TAG})


@pytest.mark.slow
def test_a_partition_lists_prompts_and_samples_apart_until_they_are_cleared(queue: None):
    submit_prompts(VAL, ["v0", "v1"], step=2)
    asyncio.run(put_tags(VAL, {"v0_0_3": TAG}, step=2))
    asyncio.run(publish_status(VAL, "v0", PromptStatus("finished")))
    asyncio.run(publish_status(VAL, "v1", PromptStatus("failure", "out of memory")))
    found = list_partition(VAL)
    assert found.samples == {"v0_0_3": TAG}
    assert found.prompts == {"v0": PromptStatus("finished"), "v1": PromptStatus("failure", "out of memory")}
    assert all(status.has_ended for status in found.prompts.values())
    clear(VAL, ["v0", "v0_0_3", "unknown"])
    assert list(list_partition(VAL).prompts) == ["v1"] and list_partition(VAL).samples == {}
