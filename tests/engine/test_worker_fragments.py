# SPDX-License-Identifier: Apache-2.0
"""The worker's begin, accumulate, commit and abort, with samples in a real TransferQueue; one rank, in this process."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.utils import tensordict_utils as tu

from tests.engine.cases import REWARDS, Case
from tests.engine.harness import assert_equal, fragment, make_engine, num_rows_of, samples_of, train, weights
from tests.engine.harness import with_advantages as with_known_advantages
from tests.engine.test_worker import environment, make_worker  # noqa: F401 - a fixture
from verl_digen.algorithms.metric import from_plain, numbers
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.points import PathPoints
from verl_digen.engine.rows import fetch_samples
from verl_digen.engine.worker import DiffusionWorker
from verl_digen.store.conditions import put_condition
from verl_digen.types import PathRecord

pytestmark = pytest.mark.slow

PARTITION = "train"


@pytest.fixture(scope="module")
def queue(ray_cluster: None) -> Iterator[None]:
    """TransferQueue with one storage process."""
    tq.init(OmegaConf.create({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}))
    yield
    tq.close()


@pytest.fixture(scope="module")
def batch(queue: None, tiny_qwen_image: Path) -> TensorDict:
    """Samples and their prompts' conditions, as the agent loop writes them; keys are the samples' numbers."""
    batch = Case().make_batch(tiny_qwen_image)
    for number in range(len(REWARDS)):
        columns = {name: batch[name][number].unsqueeze(0) for name in PathRecord.COLUMNS}
        columns["pixels"] = torch.zeros(1, 8)  # a column that training does not fetch
        tq.kv_batch_put(keys=[str(number)], partition_id=PARTITION, fields=TensorDict(columns, batch_size=1), tags=[{}])
    for uid, (positive, negative) in tu.get(batch, "conditions").items():
        for _ in range(2):  # groups with equal texts store the same conditions again
            asyncio.run(put_condition(f"conditions of {uid}", positive, negative))
    return batch


def described(batch: TensorDict) -> dict[str, list[FragmentSample]]:
    """The samples of `batch` by group, with the keys of their conditions."""
    return {
        uid: [replace(sample, condition_key=f"conditions of {uid}") for sample in samples]
        for uid, samples in samples_of(batch, REWARDS).items()
    }


def test_samples_come_in_the_order_they_are_asked_for(batch: TensorDict):
    samples = [sample for group in described(batch).values() for sample in group]
    random.Random(0).shuffle(samples)
    found = fetch_samples(PathPoints(), PARTITION, samples)
    for place, sample in enumerate(samples):
        number = int(sample.key)
        for name in PathRecord.COLUMNS:
            torch.testing.assert_close(found.columns[name][place], batch[name][number], rtol=0, atol=0)
        positive, _ = tu.get(batch, "conditions")[sample.uid]
        assert torch.equal(found.conditions[place][0]["embeds"], positive["embeds"])


def test_fragments_are_one_update_on_the_whole_batch(environment: None, batch: TensorDict, tiny_qwen_image: Path):  # noqa: F811
    worker, engine = make_worker(tiny_qwen_image), make_engine(tiny_qwen_image, optim={"lr_warmup_steps": 4})
    groups = described(batch)
    for _ in range(2):
        worker.begin(len(REWARDS), num_rows_of(groups), PARTITION)
        counts = worker.accumulate(fragment(groups, "g0", "g1", "g2"))
        metrics = numbers(from_plain(worker.commit()))
        train(engine, with_known_advantages(batch, REWARDS, "batch", 5.0))
    assert counts["num_rows"] == 18 and counts["accumulate_s"] > 0
    assert metrics["lr"] == pytest.approx(1e-3 * 2 / 4)
    assert metrics["num_rows"] == 18 and metrics["ratio_deviation_max"] == 0.0 and metrics["num_fragments"] == 1
    assert {"loss", "grad_norm", "policy_loss", "num_skipped_updates", "perf/max_memory_allocated_gb"} <= metrics.keys()
    assert all(isinstance(value, float | int) for value in metrics.values())
    assert_equal(weights(worker.engine), weights(engine))


@pytest.mark.parametrize("name", ["begin", "accumulate", "assist", "commit", "abort"])
def test_every_rank_gets_the_same_call_and_none_blocks_the_driver(name: str):
    attributes = getattr(getattr(DiffusionWorker, name), MAGIC_ATTR)
    assert attributes["dispatch_mode"] == Dispatch.ONE_TO_ALL  # pyright: ignore[reportAttributeAccessIssue]
    assert attributes["blocking"] is False
