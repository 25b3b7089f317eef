# SPDX-License-Identifier: Apache-2.0
"""Records, tags, statuses and conditions through a real TransferQueue."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq

from tests.agent_loop.test_episodes import long_one, make_digen, scored
from tests.tags import SAMPLING, make_facts, make_tag
from verl_digen.agent_loop.manager import DiffusionAgentLoopWorker
from verl_digen.algorithms.outside import Outside
from verl_digen.schedulers.types import BatchReport
from verl_digen.store.client import fetch_columns
from verl_digen.store.conditions import fetch_conditions, own_condition_keys, put_condition
from verl_digen.store.keys import CONDITIONS, TRAIN, VAL, SampleName, own_condition_key
from verl_digen.store.samples import (
    Listing,
    PromptStatus,
    clear,
    from_batch,
    from_entry,
    list_partition,
    publish_status,
    put_samples,
    put_tags,
    submit_prompts,
    to_batch,
    to_entry,
    to_listing,
)
from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.trainer.published import BatchOutcome, PublishedSamples
from verl_digen.types import CleanRecord, PathRecord, RewardCall, Trajectory


def path_record(num_steps: int, dtype: torch.dtype) -> PathRecord:
    """A record of `num_steps` consecutive steps."""
    sigmas = torch.linspace(0.9, 0.1, num_steps + 1)
    return PathRecord(
        latents=torch.randn(num_steps + 1, 4, 8).to(dtype),
        positions=torch.arange(num_steps),
        sigmas=sigmas[:-1],
        next_sigmas=sigmas[1:],
        sigma_max=torch.tensor(0.9),
        log_probs=torch.randn(num_steps),
    )


def clean_record(num_points: int, dtype: torch.dtype) -> CleanRecord:
    return CleanRecord(torch.randn(4, 8).to(dtype), torch.linspace(1.0, 0.1, num_points))


def trajectory(index: int, record: PathRecord | CleanRecord) -> Trajectory:
    return Trajectory(make_facts("g0", index, version=3, num_steps=len(record.sigmas)), record)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [(3, 3), (2, 4)], ids=["equal", "different"])
@pytest.mark.parametrize("make", [path_record, clean_record])
def test_records_come_back_bit_for_bit_in_the_order_asked_for(queue, make, counts, dtype):
    records = {f"g0_{index}_3": make(count, dtype) for index, count in enumerate(counts)}
    tags = {key: make_tag(0.5, version=3, num_steps=len(record.sigmas)) for key, record in records.items()}
    stored = {key: (trajectory(index, record), tags[key]) for index, (key, record) in enumerate(records.items())}
    asyncio.run(put_samples(stored, step=4))
    try:
        assert list_partition(TRAIN).samples == tags
        for keys in (list(records), list(reversed(records))):
            columns = fetch_columns(TRAIN, keys, type(records[keys[0]]).COLUMNS)
            assert columns.keys() == set(type(records[keys[0]]).COLUMNS)
            for position, key in enumerate(keys):
                for name, expected in records[key].columns().items():
                    got = columns[name][position]
                    assert got.dtype == expected.dtype and torch.equal(got, expected), name
        with pytest.raises(RuntimeError, match="3 rows of train are to be trained, but TransferQueue has"):
            fetch_columns(TRAIN, [*records, "unknown"], CleanRecord.COLUMNS)
    finally:
        clear(TRAIN, list(records))


# -- tags and statuses through a real TransferQueue, and as verl's replay buffer reads them ------------------
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
    lost = PromptStatus("failure", "every reward worker is lost", ends_run=True)
    asyncio.run(publish_status(VAL, "v2", lost))
    found = list_partition(VAL)
    assert found.samples == {"v0_0_3": TAG}
    failed = {"v1": PromptStatus("failure", "out of memory"), "v2": lost}
    assert found.prompts == {"v0": PromptStatus("finished"), **failed}
    assert all(status.has_ended for status in found.prompts.values())
    clear(VAL, ["v0", "v0_0_3", "v2", "unknown"])
    assert list(list_partition(VAL).prompts) == ["v1"] and list_partition(VAL).samples == {}


# -- conditions in a real TransferQueue: those of a group alone are found and cleared, told by a tag or not --
def test_conditions_come_back_under_their_keys_with_both_branches(queue):
    pairs = {
        key: ({"embeds": torch.full((2, 3), value)}, {"embeds": torch.full((1, 3), -value)})
        for key, value in (("hash b", 2.0), ("hash a", 1.0))
    }
    for key, pair in pairs.items():
        asyncio.run(put_condition(key, *pair))
    try:
        found = fetch_conditions(["hash a", "hash b", "hash a"])
    finally:
        clear(CONDITIONS, list(pairs))
    assert list(found) == ["hash a", "hash b"]
    for key, branches in found.items():
        for branch, expected in zip(branches, pairs[key], strict=True):
            assert branch is not None and torch.equal(branch["embeds"], expected["embeds"])


REPORT = BatchReport(0)


def stored() -> set[str]:
    return {*tq.kv_list(CONDITIONS).get(CONDITIONS, {})}


@pytest.mark.slow
def test_nothing_is_left_of_an_episode_that_was_published_after_its_scoring_timed_out(queue):
    """The driver never sees its tag, and so none of the keys of its turns."""
    sample = scored(long_one(make_digen()))
    uid, version = sample.trajectory.facts.uid, sample.tag.facts.version
    name = SampleName.of(sample.tag.facts)
    others = {own_condition_key(f"{uid}0", "of a longer uid"), "hash of a prompt that still waits"}
    condition = {"embeds": torch.ones(2, 3)}
    worker = object.__new__(DiffusionAgentLoopWorker)
    asyncio.run(worker._publish_rows([sample], 4))
    for key in (*others, "hash of its prompt"):
        asyncio.run(put_condition(key, condition, None))
    try:
        assert stored() == {*sample.tag.turn_keys, *others, "hash of its prompt"} and len(sample.tag.turn_keys) > 1
        assert own_condition_keys([uid]) == {*sample.tag.turn_keys} and not own_condition_keys([])
        published = PublishedSamples()
        published.doubt([SampleName(uid, name.sample_index, version)], "hash of its prompt")
        trainer = object.__new__(DisaggregatedTrainer)
        waiting = SimpleNamespace(condition_keys=lambda: {"hash of a prompt that still waits"})
        vars(trainer).update(_condition_keys={"hash of a prompt that still waits"}, _generator=waiting)
        trainer._clear(BatchOutcome(REPORT, {}, 0.0, published))
        assert stored() == others
        assert not list_partition(TRAIN).samples
    finally:
        clear(CONDITIONS, sorted(stored()))
