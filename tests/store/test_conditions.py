# SPDX-License-Identifier: Apache-2.0
"""Conditions in a real TransferQueue: those of a group alone are found and cleared, told by a tag or not."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
import transfer_queue as tq

from tests.agent_loop.test_episodes import long_one, make_digen, scored
from verl_digen.agent_loop.manager import DiffusionAgentLoopWorker
from verl_digen.schedulers.types import BatchReport
from verl_digen.store.conditions import own_condition_keys, put_condition
from verl_digen.store.keys import SampleName, own_condition_key
from verl_digen.store.partitions import CONDITIONS, TRAIN
from verl_digen.store.prompts import list_partition
from verl_digen.store.samples import clear
from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.trainer.published import PublishedSamples

pytestmark = pytest.mark.slow
REPORT = BatchReport(*[0] * 7, None, {}, {}, 0, 0, 0, 0)


def stored() -> set[str]:
    return {*tq.kv_list(CONDITIONS).get(CONDITIONS, {})}


def test_nothing_is_left_of_an_episode_that_was_published_after_its_scoring_timed_out(queue):
    """The driver never sees its tag, and so none of the keys of its turns."""
    sample = scored(long_one(make_digen()))
    uid, version = sample.trajectory.uid, sample.tag.version
    name = SampleName.of(uid, sample.trajectory.sample_index, sample.tag)
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
        trainer._clear(published.outcome(REPORT, {}, trained=(), slowest_decision_s=0.0))
        assert stored() == others
        assert not list_partition(TRAIN).samples
    finally:
        clear(CONDITIONS, sorted(stored()))
